"""examples/one_file.py trains as the trainer does, to the bit, and stays short."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import corpora
import launch
import tiny
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import to_flat
from gpt2lab.interop.import_shards import import_folder
from gpt2lab.tokenizers.plain import BYTES
from token_files import UNKNOWN

FILE = launch.REPOSITORY / "examples" / "one_file.py"
STEPS = 50
SHAPES = {
    "bytes": [
        *("--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16"),
        *("--total_batch_size=128", "--mini_batch_size=2"),  # accumulates 4
    ],
    "unknown": [
        *("--n_layer=3", "--n_head=4", "--n_embd=48", "--context_length=32"),
        *("--total_batch_size=192", "--mini_batch_size=3", "--vocab_size=256"),  # accumulates 2
    ],
    "gpt2": [  # 50,304 rows
        *("--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16"),
        *("--total_batch_size=64", "--mini_batch_size=2"),
    ],
}


def load() -> Any:
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return folders of shards: `bytes/` and `gpt2/`, whose models have padding rows, `unknown/` without documents."""
    folder = tmp_path_factory.mktemp("one_file")
    source = corpora.write_jsonl(folder / "texts.jsonl", corpora.TEXTS)
    sizes = {"shard_tokens": 1000, "val_tokens": 500}
    corpora.run_prepare(source, folder / "bytes", tokenizer=BYTES, **sizes)
    corpora.run_prepare(source, folder / "gpt2", shard_tokens=400, val_tokens=200)
    tiny.write_shards(folder / "unknown", train=tiny.TRAIN_SHARDS, val=tiny.VAL_SHARDS)
    import_folder(folder / "unknown", UNKNOWN)
    return folder


def flags_of(data: Path, shape: str, *more: str) -> list[str]:
    """Return flags that both programs know."""
    learning = [f"--max_steps={STEPS}", "--max_lr=0.01"]
    return [f"--data_dir={data / shape}", *SHAPES[shape], *learning, *more]


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("shuffle", ["shards", "windows", "none"])
@pytest.mark.parametrize("shape", ["bytes", "unknown", *launch.slow("gpt2")])
def test_every_number_is_the_trainers_to_the_bit(shape, shuffle, data, tmp_path, monkeypatch):
    flags = flags_of(data, shape, f"--shuffle={shuffle}")
    one_file, validation = load(), []

    def measure(*args: Any) -> float:
        validation.append(measured(*args))
        return validation[-1]

    measured = one_file.validation_loss
    monkeypatch.setattr(one_file, "validation_loss", measure)
    one_file.main([*flags, f"--json={tmp_path / 'steps.jsonl'}"])

    plain = ["--device=cpu", "--dtype=fp32", "--compile=off"]
    run = [f"--checkpoint_dir={tmp_path}", "--run_name=trainer", "--epoch_checkpoints=off"]
    launch.worked(launch.call(launch.TRAIN, *flags, *plain, *run))
    steps = launch.events(tmp_path / "trainer", "step")
    assert steps[-1]["epoch"] >= 1
    keys = ("step", "loss", "grad_norm", "lr")
    assert lines_of(tmp_path / "steps.jsonl") == [{key: one[key] for key in keys} for one in steps]
    assert len(steps) == STEPS
    assert validation == [one["val_loss"] for one in launch.events(tmp_path / "trainer", "eval")]


def test_a_process_of_its_own_computes_the_same(data, tmp_path):
    flags = flags_of(data, "bytes", "--max_steps=3")
    load().main([*flags, f"--json={tmp_path / 'here.jsonl'}"])
    # -I: without this project's folders on the path.
    command = [sys.executable, "-I", str(FILE), *flags, f"--json={tmp_path / 'there.jsonl'}"]
    done = subprocess.run(command, env=launch.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert lines_of(tmp_path / "there.jsonl") == lines_of(tmp_path / "here.jsonl")
    printed = [line.partition(" | ")[0].partition(":")[0] for line in done.stdout.splitlines()]
    assert printed == ["step 0/3", "step 1/3", "step 2/3", "step 3/3", "step 3/3", "sample"]


def test_it_is_300_lines_of_torch_and_numpy():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "numpy"}


def test_its_defaults_are_the_trainers():
    one_file, ours = load(), to_flat(Config())
    depends = {"data_dir", "vocab_size", "json"}  # on the folder, or not a setting of the trainer
    defaults = {name: default for name, (_, default, _) in one_file.FLAGS.items()}
    for name in set(defaults) - depends:
        assert defaults[name] == ours[name], name
    assert one_file.parse([]).shuffle == ours["shuffle"]
    assert (ours["weight_decay"], ours["grad_clip"]) == (one_file.DECAY, one_file.GRAD_CLIP)
    assert ((ours["beta1"], ours["beta2"]), ours["adam_eps"]) == (one_file.BETAS, one_file.EPS)
    assert (ours["eval_freq"], ours["val_tokens"]) == (one_file.EVAL_FREQ, one_file.VAL_TOKENS)


@pytest.mark.parametrize(
    "flag",
    [
        *("--n_layers=2", "--n_layer=two", "--n_layer=0", "--n_embd=33", "--mini_batch_size=3"),
        *("--max_lr=nan", "--seed=-1", "--shuffle=all", "--vocab_size=99"),
        *("--context_length=100000", "--data_dir=nowhere", "--json=nowhere/steps.jsonl"),
    ],
)
def test_bad_input_is_one_line(flag, data, tmp_path, wording):
    more = ["--total_batch_size=100000", "--mini_batch_size=1"] if "context" in flag else []
    done = launch.call(FILE, *flags_of(data, "bytes", *more, flag), folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    wording(done.stderr)


def test_less_data_than_a_step_and_damaged_data_are_one_line(data, tmp_path):
    flags = ["--n_embd=12", "--context_length=16", "--mini_batch_size=1"]
    done = launch.call(FILE, *flags, f"--data_dir={data / 'bytes'}", "--total_batch_size=16000")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    shutil.copytree(data / "bytes", tmp_path / "cut")
    shard = next((tmp_path / "cut").glob("*train*.npy"))
    shard.write_bytes(shard.read_bytes()[:-8])
    manifest = (tmp_path / "cut" / "shards.json").read_text()
    for text in (manifest, manifest.replace(".npy", ".bin")):
        (tmp_path / "cut" / "shards.json").write_text(text)
        done = launch.call(FILE, *flags, f"--data_dir={tmp_path / 'cut'}", "--total_batch_size=16")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "needs .npy shards" in done.stderr


@pytest.mark.parametrize("steps", [1, STEPS])
def test_a_loss_that_is_not_finite_ends_the_run(steps, data):
    done = launch.call(FILE, *flags_of(data, "bytes", "--max_lr=1e30", f"--max_steps={steps}"))
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "--max_lr" in line) == (76, True)
