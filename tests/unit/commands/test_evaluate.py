"""scripts/evaluate.py and scripts/compare.py as people use them: the run's own numbers, and honest differences."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import torch

import launch
import token_files
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import Results, read_results, write_results
from gpt2lab.interop.import_shards import import_folder
from gpt2lab.lab.compare import compare
from gpt2lab.runs import weights
from gpt2lab.tokenizers.gpt2 import gpt2_encoding
from launch import REPOSITORY, SCRIPTS, ask
from tiny import (
    CONTEXT,
    flags_of,
    flip_bit,
    make_tokens,
    parse,
    pretrain,
    write_inputs,
    write_shards,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with two runs, `a` and `b`, that differ in their seed."""
    folder = write_inputs(tmp_path_factory.mktemp("evaluate"), items=20)
    for name, seed in (("a", 1), ("b", 2)):
        pretrain(parse(flags_of(folder, name, f"--seed={seed}")))
    return folder


def last(folder: Path, run: str, kind: str, step: int = 4) -> dict[str, Any]:
    return next(e for e in launch.events(folder / "runs" / run, kind) if e["step"] == step)


def test_evaluate_repeats_the_runs_own_numbers(folder, tmp_path):
    event, scores = last(folder, "a", "eval"), last(folder, "a", "hellaswag")
    both = ask("evaluate.py", "a", "--val=data", "--hellaswag", "--json", folder=folder)
    assert both["step"] == 4
    for name in ("val_loss", "val_loss_se", "val_tokens", "bits_per_byte"):
        assert both[name] == event[name]
    assert set(both["hellaswag"]) == {
        *("n", "acc", "acc_se", "acc_norm", "acc_norm_se", "acc_token_norm", "acc_token_norm_se")
    }
    for name, value in both["hellaswag"].items():
        assert value == scores[name]
    one_text = ("--hellaswag", "--hellaswag_metrics=harness")
    alone = ask("evaluate.py", "a", *one_text, "--json", folder=folder)["hellaswag"]
    assert alone == both["hellaswag"] | {"acc_token_norm": None, "acc_token_norm_se": None}
    earlier = ask("evaluate.py", "runs/a/step_00000002", "--json", folder=folder)
    assert (earlier["step"], earlier["hellaswag"]) == (2, None)
    assert earlier["val_loss"] == last(folder, "a", "eval", 2)["val_loss"]
    # Numbers that cannot be saved are printed.
    (tmp_path / "taken").touch()
    words = ("a", "--checkpoint_dir=runs", "--val=data", f"--save={tmp_path / 'taken'}")
    done = launch.call("evaluate.py", *words, folder=folder)
    *numbers, error = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (75, "")
    assert f"{event['val_loss']:.4f}" in numbers[1]
    assert error.endswith("taken/validation.npz: File exists; choose another --save")


@pytest.mark.slow
def test_two_processes_find_the_same(folder):
    argv = ("a", f"--val={folder / 'data'}", "--hellaswag", "--json")
    alone = ask("evaluate.py", *argv, folder=folder)
    words = [*argv, f"--checkpoint_dir={folder / 'runs'}"]
    done = launch.train_in_forks(words, world=2, program=SCRIPTS / "evaluate.py")
    together = json.loads(launch.worked(done).stdout)
    assert together["hellaswag"] == alone["hellaswag"]
    assert together["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)


def test_loss_and_bits_per_byte_are_those_computed_by_hand(folder):
    """In fp64, window by window, from the checkpoint's tensors."""
    from gpt2lab.checkpoint.store import load_model
    from gpt2lab.config.schema import ModelConfig
    from gpt2lab.model.gpt import empty_model

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "context_length": CONTEXT}
    model = empty_model(ModelConfig(**shape))
    load_model(folder / "runs" / "a" / "step_00000004", model)
    ids = np.load(folder / "data" / "tiny_val_000000.npy").astype(np.int64)
    count, total, nats, text = 320 // CONTEXT, (len(ids) - 1) // CONTEXT, 0.0, b""
    for number in range(count):
        start = number * total // count * CONTEXT
        window = torch.from_numpy(ids[start : start + CONTEXT + 1])
        with torch.no_grad():
            scores = model(window[None, :-1])[0, :, :50257].double()
        chosen = scores[torch.arange(CONTEXT), window[1:]]
        nats += float((scores.logsumexp(1) - chosen).sum())
        text += gpt2_encoding().decode_bytes(window[1:].tolist())
    event = last(folder, "a", "eval")
    assert event["val_loss"] == pytest.approx(nats / 320, rel=1e-6)
    assert event["bits_per_byte"] == pytest.approx(nats / np.log(2) / len(text), rel=1e-6)


def test_another_vocabulary_has_no_bits_per_byte_and_no_hellaswag(tiny_flags, tmp_path):
    pretrain(parse([*tiny_flags, "--max_steps=1"]))
    events = launch.events(tmp_path / "runs" / "tiny", "eval")
    assert [event["bits_per_byte"] for event in events] == [None, None]
    line = launch.rejected(ask("evaluate.py", "tiny", "--hellaswag", folder=tmp_path))
    assert "vocab_size 256 is below GPT-2's 50257: no HellaSwag" in line


def test_rejections_are_one_line(folder, monkeypatch):
    offline = Mock(side_effect=OSError("no network\nand more lines"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)

    def rejected(*argv: str) -> str:
        return launch.rejected(ask("evaluate.py", *argv, folder=folder))

    assert "nowhere/x/y: no run of this name" in rejected("nowhere/x/y")
    assert "no run of this name" in rejected("gpt2-of-nobody", "--hellaswag")
    assert "neither a run, a checkpoint nor a Hugging Face" in rejected("data")
    assert "no such data folder" in rejected("a", "--val=gone")
    line = rejected("a", "--hellaswag", "--hellaswag_path=gone.jsonl")
    assert "gone.jsonl: cannot be read" in line
    assert "val_tokens 0 must be at least 1" in rejected("a", "--val_tokens=0")
    more = folder / "data" / "tiny_val_000001.npy"
    np.save(more, np.ones(64, np.uint16))
    assert "data: not the data that a trained on (fingerprint " in rejected("a")
    more.unlink()


def test_damaged_data_are_named_and_a_damaged_checkpoint_is_never_evaluated(folder, tmp_path):
    other = write_shards(folder / "damaged", train=(500,), val=(500,))
    import_folder(other, token_files.GPT2)
    argv = ("a", "--val=damaged", "--json")
    assert ask("evaluate.py", *argv, folder=folder)["val_tokens"] == 320
    flip_bit(other / "tiny_val_000000.npy", 142)
    line = launch.rejected(ask("evaluate.py", *argv, folder=folder))
    assert "tiny_val_000000.npy: damaged" in line
    shutil.copytree(folder / "runs" / "a", tmp_path / "runs" / "a")
    path = tmp_path / "runs" / "a" / "step_00000004" / "model.safetensors"
    flip_bit(path)
    line = launch.rejected(ask("evaluate.py", "runs/a/step_00000004", folder=tmp_path))
    assert "damaged (sha256" in line
    assert ask("evaluate.py", "a", "--json", folder=tmp_path)["step"] == 2, "the newest valid one"


SLOW_TO_IMPORT = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")


def test_an_uncompiled_run_and_its_evaluation_import_no_compiler(tmp_path):
    """These modules take longer to import than the rest of a start."""
    write_inputs(tmp_path, items=4)
    train = flags_of(tmp_path, "run")
    evaluate = ["run", f"--checkpoint_dir={tmp_path / 'runs'}", "--val_tokens=320"]
    program = f"""
import runpy, sys
sys.path.insert(0, "src"); sys.path.insert(0, "scripts")
for name, flags in (("src/train.py", {train}), ("scripts/evaluate.py", {evaluate})):
    sys.argv = [name, *flags]
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
print([name for name in {SLOW_TO_IMPORT} if name in sys.modules])
"""
    assert launch.worked(launch.python("-c", program)).stdout.splitlines()[-1] == "[]"


def test_compare_is_the_paired_difference(folder):
    answer = ask("compare", "a", "b", "--json", folder=folder)
    folders = (folder / "runs" / run / "validation" for run in "ab")
    a, b = (read_results(one / "step_00000004.npz") for one in folders)
    d = b.per_unit["val_loss"] - a.per_unit["val_loss"]
    found = answer["metrics"]["val_loss"]
    assert found["a"] == pytest.approx(last(folder, "a", "eval")["val_loss"], rel=1e-12)
    assert found["b"] == pytest.approx(last(folder, "b", "eval")["val_loss"], rel=1e-12)
    assert found["n"] == len(d) == 20
    assert found["difference"] == pytest.approx(d.mean(), rel=1e-12)
    assert found["se"] == pytest.approx(np.sqrt(((d - d.mean()) ** 2).sum() / 19 / 20), rel=1e-9)
    assert found["within_noise"] == (abs(found["difference"]) < 2 * found["se"])
    a_acc, b_acc = (last(folder, run, "hellaswag")["acc_norm"] for run in "ab")
    assert answer["metrics"]["acc_norm"]["difference"] == pytest.approx(b_acc - a_acc)


def test_one_step_against_another_and_saved_results(folder):
    early, late = "runs/a/step_00000002", "runs/a/step_00000004"
    answer = ask("compare", early, late, "--json", folder=folder)
    losses = [last(folder, "a", "eval", step)["val_loss"] for step in (2, 4)]
    assert answer["metrics"]["val_loss"]["difference"] == pytest.approx(losses[1] - losses[0])
    ask("evaluate.py", early, "--val=data", "--save=saved", "--json", folder=folder)
    again = ask("compare", "saved", early, "--json", "--only=validation", folder=folder)
    assert (list(again["metrics"]), again["metrics"]["val_loss"]["difference"]) == (["val_loss"], 0)
    assert again["metrics"]["val_loss"]["within_noise"] is True
    assert [again["metrics"]["val_loss"][f"step_{which}"] for which in "ab"] == [2, 2]
    _, _, said = launch.call("compare", "a@4", "a@latest", "--checkpoint_dir=runs", folder=folder)
    assert said.startswith("note: a@4 and a@latest mean the same validation results; ")
    shutil.copy(folder / "saved" / "validation.npz", folder / "late.npz")
    ask("evaluate.py", late, "--val=data", "--save=saved", "--json", folder=folder)
    shutil.move(folder / "late.npz", folder / "saved" / "hellaswag.npz")
    with pytest.raises(
        DataError, match=r"saved: holds results of .*0002 and of .*0004; save those"
    ):
        compare(str(folder / "saved"), str(folder / early), checkpoint_dir=folder)


def synthetic(path: Path, values: np.ndarray, items: str = "x") -> str:
    units = {"n": len(values), "items": items}
    write_results(path, Results("hellaswag", units, {"acc": values}, {}))
    return str(path)


def test_the_words_follow_the_criterion(tmp_path):
    base = (np.random.RandomState(0).rand(1000) < 0.3).astype(float)
    slight, clear = base.copy(), base.copy()
    slight[np.flatnonzero(base == 0)[:25]] = 1  # nearly as many up as down
    slight[np.flatnonzero(base == 1)[:20]] = 0
    clear[np.flatnonzero(base == 0)[:40]] = 1
    a = synthetic(tmp_path / "a.npz", base)
    for values, verdict in ((slight, "within noise"), (clear, "beyond noise"), (base, "equal")):
        b = synthetic(tmp_path / "b.npz", values)
        (difference,) = compare(a, b, checkpoint_dir=tmp_path)
        assert difference.within_noise is (values is not clear)
        text = ask("compare", a, b, folder=tmp_path)
        row = next(line for line in text.splitlines() if line.startswith("acc"))
        assert row.endswith(f"  {verdict}")
        assert f" {difference.p:.3f} ".replace(" 0.000", " <0.001") in row
        assert "within noise: p >= 0.05" in text


def test_other_units_are_never_compared_and_a_line_says_how_to_measure(tmp_path, folder):
    a = synthetic(tmp_path / "a.npz", np.ones(10))
    with pytest.raises(DataError, match=r"not measured on the same items \(10 and 20 items"):
        compare(a, synthetic(tmp_path / "b.npz", np.ones(20)), checkpoint_dir=tmp_path)
    with pytest.raises(DataError, match=r"\(10 items each, but different ones"):
        compare(a, synthetic(tmp_path / "b.npz", np.ones(10), items="y"), checkpoint_dir=tmp_path)
    fewer = ("--val=data", "--val_tokens=160", "--save=fewer")
    ask("evaluate.py", "a", *fewer, "--json", folder=folder)
    line = launch.rejected(ask("compare", "a", "fewer", folder=folder))
    assert "validation was not measured on the same windows (20 and 10 windows)" in line
    other = write_shards(folder / "data2", train=(500,), val=(650,))
    np.save(other / "tiny_val_000000.npy", make_tokens(650, seed=77))
    ask("evaluate.py", "a", "--val=data2", "--save=others", "--json", folder=folder)
    line = launch.rejected(ask("compare", "a", "others", folder=folder))
    assert "(20 windows each, but different ones)" in line
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 nonsense")
    for b, says in (
        ("runs/nobody/x", "no run of this name"),
        (tmp_path / "empty", "gpt2lab evaluate --save, nor a model"),
        (tmp_path / "x.npz", "x.npz: not evaluation results"),
    ):
        assert says in launch.rejected(ask("compare", "a", b, folder=folder))


def test_results_of_an_abandoned_line_are_not_taken_for_the_runs(folder, tmp_path):
    """Resumed from step 2, the run's step 4 is not its newest evaluation any more."""
    shutil.copytree(folder / "runs", tmp_path / "runs")
    flags = ["--run_name=a", f"--checkpoint_dir={tmp_path / 'runs'}", "--resume=2"]
    pretrain(parse([*flags, "--stop_after_steps=3", "--device=cpu"]))
    (difference, *_) = compare("a", "b", checkpoint_dir=tmp_path / "runs", only="validation")
    assert difference.a == pytest.approx(last(folder, "a", "eval", 2)["val_loss"])


# Memory that is used up is one line and exit code 1 in every command, as it is in training.
@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)])
@pytest.mark.parametrize(
    "typed", ["sample.py a --prompt=hello", "evaluate.py a", "export_hf.py a --out=never"]
)
def test_no_room_for_the_weights_is_one_line(typed, allocate, folder, monkeypatch):
    monkeypatch.setattr(weights, "load_weights", lambda target: allocate())
    monkeypatch.setattr("gpt2lab.interop.export.load_weights", lambda target: allocate())
    done = launch.call(*typed.split(), "--checkpoint_dir=runs", folder=folder)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: out of memory: ")
    assert "this command needs more than is free" in line


def test_no_room_for_a_library_is_one_line(folder):
    """A limit so low that torch itself cannot be loaded."""
    program = "import resource, runpy, sys; limit = 300 << 20\n"
    program += "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
    program += "sys.argv = sys.argv[1:]; sys.path.insert(0, 'scripts')\n"
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = ["scripts/sample.py", str(folder / "runs" / "a"), "--prompt=hello"]
    words = [sys.executable, "-c", program, *words]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: out of memory: ")
    assert "Traceback" not in done.stderr
