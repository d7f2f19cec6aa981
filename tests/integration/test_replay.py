"""replay, why-spike and bisect on real runs with planted causes; each cause is named exactly."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import launch
from corpora import run_prepare, write_jsonl
from gpt2lab.data.manifest import read_manifest, write_manifest
from gpt2lab.data.prepare.write import measure_shard
from gpt2lab.data.verify import verify
from gpt2lab.distributed import runtime
from gpt2lab.errors import NonFiniteError
from gpt2lab.lab.why_spike import largest_spike
from gpt2lab.runs import history
from gpt2lab.tokenizers.plain import BYTES
from tiny import TINY, edit_json, parse, pretrain
from whole_run import reseal

T, S, LAST = 64, 8, 24
SPIKE, BAD = 14, 108  # the poisoned window is sample 108, of step 14
SWAPPED = 37  # number of the document that is another one
FLIPPED = 12  # step of the checkpoint with another bit
AS_LOGGED = ": batch, learning rate, loss and gradient norm are bitwise as logged"


def document(number: int, topic: str = "river") -> str:
    return (
        f"Page {number:03d}. The {topic} of year {number * 37 % 1000:03d} rose by {number * 7 % 100:02d} feet. "
        * 4
    )


def flags_of(folder: Path, name: str, data: str, *more: str) -> list[str]:
    return [
        *(*TINY, "--n_layer=1", f"--context_length={T}", "--vocab_size=257", "--val_tokens=640"),
        *(f"--total_batch_size={T * S}", "--mini_batch_size=4", f"--max_steps={LAST}"),
        *("--eval_freq=0", "--sample_freq=0", "--checkpoint_freq=4", "--max_lr=0.01"),
        *("--grad_clip=0", "--epoch_checkpoints=off", f"--data_dir={folder / data}"),
        *(f"--run_name={name}", f"--checkpoint_dir={folder / 'runs'}", *more),
    ]


def train(folder: Path, name: str, data: str = "clean", *more: str) -> None:
    pretrain(parse(flags_of(folder, name, data, *more)))


def poison(folder: Path) -> None:
    """Overwrite all targets of one window, so that everything verifies."""
    listed = read_manifest(folder)
    (file,) = [one for one in listed["files"] if one["split"] == "train"]
    path = folder / file["name"]
    ids = np.load(path)
    ids[BAD * T + 1 : BAD * T + T] = ord("x")
    np.save(path, ids)
    offset = path.stat().st_size - ids.nbytes
    found = measure_shard(path, offset=offset, tokenizer=BYTES, end_of_text=BYTES.end_of_text)
    file |= {name: found[name] for name in file.keys() & found.keys()}
    (folder / "shards.json").unlink()
    write_manifest(folder, listed)
    assert verify(folder) == []


def flip(folder: Path, tensor: str, place: int, *, redo: bool) -> None:
    """Flip the lowest bit of one weight's exponent, and make the checksums fit again."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + size])[tensor]["data_offsets"][0]
    content[8 + size + begin + 4 * place + 2] ^= 0x80
    path.write_bytes(content)
    if redo:
        known = {"sha256": hashlib.sha256(content).hexdigest()}
        reseal(folder, lambda listed: listed["files"]["model.safetensors"].update(known))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with the data and runs of all tests; treat as read-only."""
    folder = tmp_path_factory.mktemp("replays")
    for name, swapped in (("clean", None), ("swapped", SWAPPED)):
        texts = [document(n, "ocean" if n == swapped else "river") for n in range(1, 90)]
        source = write_jsonl(folder / f"{name}.jsonl", texts)
        run_prepare(source, folder / name, val_tokens=700, tokenizer=BYTES)
    shutil.copytree(folder / "clean", folder / "poisoned")
    poison(folder / "poisoned")
    train(folder, "clean")
    train(folder, "poisoned", "poisoned")
    return folder


@pytest.fixture
def own(place, tmp_path) -> Path:
    """Return a copy of the runs to spoil, over the same data."""
    shutil.copytree(place / "runs", tmp_path / "runs")
    for name in ("clean", "poisoned", "swapped"):
        (tmp_path / name).symlink_to(place / name)
    return tmp_path


def call(program: str, folder: Path, *words: object, code: int = 0) -> Any:
    """Return what a program prints, as JSON where that is asked for; its error line where it is rejected."""
    done = launch.call(program, *words, f"--checkpoint_dir={folder / 'runs'}")
    assert done.returncode == code, done
    if code == 2:
        return done.stderr.splitlines()[-1]
    return json.loads(done.stdout) if "--json" in words else done.stdout


def listing(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return every path of a run with its inode's times and the hash of its content."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        stat = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (stat.st_mtime_ns, stat.st_ctime_ns, content)
    return found


def test_a_replay_repeats_every_bit_and_leaves_the_run_as_it_was(place, monkeypatch):
    before = listing(place / "runs" / "clean")
    found = call("replay", place, "clean", "--steps=10:13", "--layers", "--json")
    assert listing(place / "runs" / "clean") == before
    assert (found["from_step"], found["departure"], found["compared"]) == (8, None, "bits")
    logged = launch.steps(place / "runs" / "clean")
    assert [step["step"] for step in found["steps"]] == [10, 11, 12, 13]
    for step in found["steps"]:
        event = logged[step["step"]]
        for name in ("loss", "grad_norm", "lr", "batch_hash", "updated"):
            assert step["replayed"][name] == event[name]
        squares = sum(norm**2 for norm in step["layers"].values())
        assert squares**0.5 == pytest.approx(event["grad_norm"], rel=1e-5)
        assert list(step["layers"]) == ["wte", "wpe", "blocks.0", "ln_f"]
    assert f"steps 9 to 13{AS_LOGGED}" in call("replay", place, "clean", "--steps=10:13")
    monkeypatch.setenv("RANK", "0")
    line = call("replay", place, "clean", "--steps=9", code=2)
    assert "a replay is one process; start it without torchrun" in line


@pytest.mark.slow
def test_a_compiled_run_is_replayed_compiled(own):
    train(own, "compiled", "clean", "--compile=on", "--stop_after_steps=6")
    for name in ("compiled", "clean"):  # compiling leaves nothing behind for the other
        assert "bitwise as logged" in call("replay", own, name, "--steps=5:6")


def test_a_compiled_run_is_replayed_where_nothing_can_compile(own, monkeypatch):
    edit_json(own / "runs" / "clean" / "config.json", compile="on")
    monkeypatch.setenv("PATH", "")
    said = call("replay", own, "clean", "--steps=9").splitlines()[-1]
    assert said == (
        "step 9: the same batches and learning rates; losses within 1e-5 and gradient norms within 1e-4, "
        "because the run was compiled, and nothing can compile here (no C++ compiler on the PATH)"
    )


def test_a_sample_left_out_is_out_of_the_mean_and_of_nothing_else(place):
    one = ("poisoned", f"--without_sample={BAD}", "--json")
    found = call("replay", place, *one, "--steps=14:15", "--layers")
    spike, after = found["steps"]
    assert found["change"] == f"without sample {BAD}"
    assert (spike["targets"], after["targets"]) == ((S - 1) * T, S * T)
    assert spike["replayed"]["batch_hash"] == spike["logged"]["batch_hash"]
    assert spike["replayed"]["grad_norm"] < 0.5 * spike["logged"]["grad_norm"]
    assert after["replayed"]["loss"] != after["logged"]["loss"]
    as_was = spike["layers_unchanged"]
    total = sum(norm**2 for norm in as_was.values()) ** 0.5
    assert total == pytest.approx(spike["logged"]["grad_norm"], rel=1e-5)
    assert as_was.keys() == spike["layers"].keys()
    # The mean of the rest, from the losses of the samples alone.
    parts = call("why-spike", place, "poisoned", "--step=14", "--json")["parts"]
    rest = [part["loss"] for part in parts if part["sample"] != BAD]
    assert spike["replayed"]["loss"] == pytest.approx(sum(rest) / len(rest), rel=1e-5)


def test_a_document_is_left_out_wherever_it_is_a_target(place):
    """Document n is the n-th of the training split; its targets are found by its text."""
    (path,) = (place / "clean").glob("*train*.npy")
    ids = np.load(path)
    number, end = 36, BYTES.end_of_text
    places = np.flatnonzero(ids == end)
    begin, stop = places[number - 1] + 1, places[number]  # and the end of text that ends it
    targets = [range(before * S * T + 1, (before + 1) * S * T + 1) for before in (12, 13, 14)]
    count = [len({*range(begin, stop + 1)} & {*of_step}) for of_step in targets]
    assert sum(count) == stop - begin + 1
    words = ("--steps=13:15", f"--without_document={number}", "--json")
    found = call("replay", place, "clean", *words)
    assert [S * T - step["targets"] for step in found["steps"]] == count


def test_another_rate_holds_from_the_first_step_asked_for(place):
    found = call("replay", place, "clean", "--steps=11:13", "--max_lr=0.02", "--json")
    first, second, _ = found["steps"]
    assert first["replayed"]["loss"] == first["logged"]["loss"]
    assert first["replayed"]["lr"] == pytest.approx(2 * first["logged"]["lr"], rel=1e-12)
    assert second["replayed"]["loss"] != second["logged"]["loss"]


def test_a_bf16_run_is_replayed_as_it_was_and_in_fp32(own, monkeypatch):
    monkeypatch.setattr(runtime, "fastest_dtype", lambda device: "bf16")  # emulated where it is not
    train(own, "half", "clean", "--dtype=bf16", "--stop_after_steps=6")
    assert "bitwise as logged" in call("replay", own, "half", "--steps=6")
    for name, dtype, is_same in (("half", "fp32", False), ("clean", "fp32", True)):
        found = call("replay", own, name, "--steps=6", f"--dtype={dtype}", "--json")
        (step,) = found["steps"]
        for quantity in ("loss", "grad_norm"):
            before, now = (step[when][quantity] for when in ("logged", "replayed"))
            assert now == pytest.approx(before, rel=1e-2)
            assert (now == before) == is_same
        assert (found["departure"], found["change"]) == (None, f"with dtype {dtype}")


@pytest.mark.parametrize(
    "words",
    [
        *("clean --steps=3:4", "clean --steps=24:25", "clean --steps=x", "clean --steps=9:7"),
        *("clean --steps=9 --without_sample=5", "clean --steps=9 --without_document=80"),
        *("clean --steps=9 --max_lr=-1", "clean --steps=9 --max_lr=1 --dtype=fp32"),
        f"clean --steps=9 --without_sample {' '.join(map(str, range(64, 72)))}",
        "nobody --steps=9",
    ],
)
def test_what_cannot_be_replayed_is_said_in_a_line(words, place, wording):
    wording(call("replay", place, *words.split(), code=2))


def test_data_that_are_gone_or_others_are_not_taken_for_the_run_s_own(own):
    """The batch is compared in steps with a change too: nothing else would tell other data there."""
    (own / "moved").symlink_to(own / "clean")
    train(own, "mine", "moved", f"--stop_after_steps={SPIKE}")
    (own / "moved").unlink()
    here, other = (f"--data_dir={own / name}" for name in ("clean", "swapped"))
    cases = (("replay", "--steps=9", AS_LOGGED), ("why-spike", "--step=9", ": as logged"))
    for program, flag, says in cases:
        line = call(program, own, "mine", flag, code=2)
        assert line.endswith("if they were moved, say where with --data_dir")
        assert says in call(program, own, "mine", flag, here)
        line = call(program, own, "mine", flag, other, code=2)  # the documents of step 9 are equal
        assert "swapped: not the data that mine was trained on (fingerprint " in line
        line = call(program, own, "mine", flag, "--data_dir=gone", code=2)  # not: prepare it
        assert "gone: no such folder; say where the run's data are now (" in line
    # In bisect the other run keeps its own data.
    assert "the sample is unknown" in call("bisect", own, "mine", "poisoned", code=1)
    said = call("bisect", own, "mine", "poisoned", here, code=1)
    assert f"batch: 1 of {S} samples differ, the first is sample {BAD}" in said
    line = call("bisect", own, "clean", "poisoned", "--data_dir=gone", code=2)
    assert "gone: no such folder; say where the run's data are now (" in line
    (own / "moved").symlink_to(own / "poisoned")
    words = (f"--steps={SPIKE}", "--max_lr=0.02", "--json")
    found = call("replay", own, "mine", *words, code=1)
    assert (found["departure"]["step"], found["departure"]["quantity"]) == (SPIKE, "batch")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *(("batch_hash", "batch"), ("lr", "learning rate"), ("loss", "loss")),
        ("grad_norm", "gradient norm"),
    ],
)
def test_a_step_that_is_not_as_logged_is_named(field, name, own):
    run = own / "runs" / "clean"
    value = launch.steps(run)[11][field]
    other = "0" * 64 if field == "batch_hash" else np.nextafter(value, 9.0)
    launch.edit_step(run, 11, **{field: other})
    said = call("replay", own, "clean", "--steps=10:13", code=1)
    assert f"not as logged: step 11 is the first that differs, in its {name} (" in said


def test_a_flipped_bit_of_a_checkpoint_is_the_first_difference(own):
    """It loads with its checksums redone; left as they are, the checkpoint is passed over."""
    run = own / "runs" / "clean"
    facts = json.loads((run / "run.json").read_text())
    facts["environment"]["torch"] = "1.0"
    (run / "run.json").write_text(json.dumps(facts))
    flip(run / "step_00000012", "wte.weight", 5, redo=False)
    said = call("replay", own, "clean", "--steps=14")
    assert "skipped: " in said
    assert "step_00000012/model.safetensors: damaged (sha256 does not match" in said
    assert "from the checkpoint of step 8" in said
    flip(run / "step_00000012", "wte.weight", 5, redo=False)  # back
    flip(run / "step_00000012", "ln_f.weight", 5, redo=True)
    found = call("replay", own, "clean", "--steps=14:15", "--json", code=1)
    assert (found["departure"]["step"], found["departure"]["quantity"]) == (13, "loss")
    said = call("replay", own, "clean", "--steps=14:15", code=1)
    assert f"likely cause: torch 1.0 -> {torch.__version__}" in said


def test_the_poisoned_window_is_named_with_its_pattern(place):
    before = listing(place / "runs" / "poisoned")
    found = call("why-spike", place, "poisoned", "--json")
    said = call("why-spike", place, "poisoned", f"--step={SPIKE}", "--worst=2")
    assert (listing(place / "runs" / "poisoned"), found["step"]) == (before, SPIKE)
    assert "standard deviations above the mean of the 13 steps before" in found["how"]
    parts = found["parts"]
    assert (parts[0]["sample"], len(parts)) == (BAD, S)
    assert max(parts, key=lambda part: part["loss"])["sample"] == BAD
    assert sum(p["projection"] for p in parts) == pytest.approx(found["grad_norm"], rel=1e-4)
    logged = launch.steps(place / "runs" / "poisoned")[SPIKE]
    assert (found["loss"], found["grad_norm"]) == (logged["loss"], logged["grad_norm"])
    # As a replay without the sample.
    words = ("poisoned", f"--steps={SPIKE}", f"--without_sample={BAD}", "--json")
    again = call("replay", place, *words)["steps"][0]["replayed"]
    assert found["without"][0] == {"sample": BAD} | {n: again[n] for n in ("loss", "grad_norm")}
    number = int((np.load(next((place / "poisoned").glob("*train*.npy")))[: BAD * T] == 256).sum())
    assert found["samples"][str(BAD)]["documents"] == [number]
    assert f"without sample {BAD} (repetition of one token (id 120, 'x'), {T - 1} times" in said
    assert f" the norm is {again['grad_norm']:.3g} instead of {logged['grad_norm']:.3g}" in said
    assert f"sample {BAD}: clean_train_000000.npy from token {BAD * T}, document {number}" in said
    assert "no single sample explains" not in said
    # A step without a culprit is called so.
    said = call("why-spike", place, "clean", "--step=9", "--worst=1")
    assert said.splitlines()[-1] == "no single sample explains this norm"
    assert "as logged" in said


def test_a_step_of_one_sample_is_explained(own):
    train(own, "one", "clean", f"--total_batch_size={T}", "--mini_batch_size=1", "--max_steps=6")
    found = call("why-spike", own, "one", "--step=6", "--json")
    (part,) = found["parts"]
    assert part["projection"] == pytest.approx(found["grad_norm"], rel=1e-4)
    assert (list(found["samples"]), found["without"]) == ([str(part["sample"])], [])
    assert "as logged" in call("why-spike", own, "one", "--step=6")


def test_a_step_that_no_sample_broke_is_called_so(own):
    with pytest.raises(NonFiniteError):
        train(own, "broken", "clean", "--max_lr=1e30")
    said = call("why-spike", own, "broken")
    assert "no sample of the step has a finite loss, so the weights" in said.splitlines()[-1]
    assert "nan" not in said
    wanted = (("why-spike", "broken"), ("replay", "broken", "--steps=5", "--layers"))
    rest = ("--json", f"--checkpoint_dir={own / 'runs'}")
    answers = [launch.call(*words, *rest).stdout for words in wanted]
    assert all("null" in answer and "NaN" not in answer for answer in answers)
    # An overflow of fp16's loss scale breaks nothing, and is not the spike.
    run = own / "runs" / "poisoned"
    for scale, step in ((1024.0, SPIKE), (None, 12)):
        launch.edit_step(run, 12, grad_norm=None, loss_scale=scale)
        assert largest_spike(history.read_log(run), after=4)[0] == step


def test_wrong_words_for_why_spike_and_a_run_of_which_no_step_can_be_replayed(own):
    train(own, "end", "clean", "--stop_after_steps=3")  # kept its end alone
    assert "step 2; no step can be replayed" in call("replay", own, "end", "--steps=2", code=2)
    log = own / "runs" / "end" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"event": "step"' not in line))
    assert "; it has logged no step yet" in call("why-spike", own, "end", code=2)
    assert "worst 0 must be at least 1" in call("why-spike", own, "clean", "--worst=0", code=2)
    assert "no step 99; it has" in call("why-spike", own, "clean", "--step=99", code=2)
    for checkpoint in (own / "runs" / "clean").glob("step_*"):
        shutil.rmtree(checkpoint)
    assert "no checkpoint to replay" in call("why-spike", own, "clean", code=2)


def differing(folder: Path, other: str, a: str = "clean") -> dict[str, Any]:
    found: dict[str, Any] = call("bisect", folder, a, other, "--json", code=1)
    return found


def test_equal_runs_are_called_equal_and_a_log_that_alone_was_changed_is_told(own):
    shutil.copytree(own / "runs" / "clean", own / "runs" / "copy")
    before = listing(own / "runs")
    said = call("bisect", own, "clean", "copy")
    assert listing(own / "runs") == before
    assert f"equal: {LAST} steps" in said
    assert ("6 checkpoints of both" in said, "0 replays" in said) == (True, True)
    launch.edit_step(own / "runs" / "copy", 14, loss=1.0)
    found = differing(own, "copy")
    assert (found["step"], found["quantity"], found["replays"]) == (14, "loss", 0)
    why = "their checkpoints of step 16 are equal, every byte: only the logs differ"
    assert found["conclusion"] == [why]


def test_a_flipped_bit_is_named_by_its_tensor(own):
    shutil.copytree(own / "runs" / "clean", own / "runs" / "flipped")
    run = own / "runs" / "flipped"
    flip(run / f"step_{FLIPPED:08d}", "blocks.0.mlp.c_fc.weight", 70, redo=False)
    line = call("bisect", own, "clean", "flipped", code=2)
    assert f"flipped/step_{FLIPPED:08d}/model.safetensors: damaged (sha256" in line
    flip(run / f"step_{FLIPPED:08d}", "blocks.0.mlp.c_fc.weight", 70, redo=False)  # back
    flip(run / f"step_{FLIPPED:08d}", "blocks.0.mlp.c_fc.weight", 70, redo=True)
    found = differing(own, "flipped")
    assert (found["step"], found["quantity"], found["replays"]) == (FLIPPED, "tensor", 0)
    ((_, text),) = found["differences"]
    what = "1 of 4,096 values differ, the first at [2, 6]"
    assert text.startswith(f"blocks.0.mlp.c_fc.weight: {what}")
    # Of weights that were imported no step is logged.
    launch.edit_step(run, FLIPPED, event="imported")
    imported = differing(own, "flipped")
    assert imported["differences"] == found["differences"]
    assert f"step {FLIPPED} is not in the logs of both runs" in imported["conclusion"][0]


@pytest.mark.slow
def test_a_run_that_went_on_from_a_flipped_bit_is_told_by_replays(own):
    """The checkpoint with the bit is gone: one replay tells which run left its course."""
    shutil.copytree(own / "runs" / "clean", own / "runs" / "flipped")
    run = own / "runs" / "flipped"
    flip(run / f"step_{FLIPPED:08d}", "blocks.0.mlp.c_fc.weight", 70, redo=True)
    train(own, "flipped", "clean", f"--resume={FLIPPED}", "--stop_after_steps=14")
    shutil.rmtree(run / f"step_{FLIPPED:08d}")
    found = differing(own, "flipped")
    assert (found["step"], found["quantity"], found["replays"]) == (FLIPPED + 1, "loss", 1)
    why = "agrees with the log of A in step 13, so B is the one that went wrong"
    assert why in found["conclusion"][0]
    # Without a common checkpoint both are replayed, and the first tensor before the step is named.
    for name, step in (("flipped", 4), ("clean", 8)):
        shutil.rmtree(own / "runs" / name / f"step_{step:08d}")
    shutil.rmtree(own / "runs" / "clean" / "step_00000012")
    found = differing(own, "flipped")
    assert (found["step"], found["quantity"], found["replays"]) == (FLIPPED + 1, "loss", 2)
    assert "the weights of both replays before step 13 are equal" in found["conclusion"]


def test_a_changed_rate_is_named(own):
    train(own, "rate", "clean", "--max_lr=0.02", "--stop_after_steps=2")
    found = differing(own, "rate")
    assert (found["step"], found["quantity"], found["replays"]) == (1, "setting", 0)
    assert found["differences"][0] == ["setting", "max_lr 0.01 and 0.02"]
    assert ["setting", "min_lr 0.001 and 0.002"] in found["differences"]
    assert "0 checkpoints of both (they share none before step 1)" in found["compared"]


def test_a_rate_changed_at_a_resume_is_named_at_its_step(own):
    shutil.copytree(own / "runs" / "clean", own / "runs" / "later")
    words = ("--resume=8", "--allow_change=max_lr", "--max_lr=0.02", "--stop_after_steps=10")
    train(own, "later", "clean", *words)
    found = differing(own, "later")
    assert (found["step"], found["quantity"]) == (9, "setting")
    # Each side of the resume replays with its own rate; a range over it is rejected.
    assert "bitwise as logged" in call("replay", own, "later", "--steps=10")
    line = call("replay", own, "later", "--steps=6:10", code=2)
    assert "a resume after step 8 changed max_lr, min_lr; replay the steps before and" in line
    # A floor that a resume kept though its peak moved: a tenth of the peak before.
    train(own, "clean", "clean", *words, "--min_lr=0.001")
    assert "bitwise as logged" in call("replay", own, "clean", "--steps=10")


@pytest.mark.slow
def test_another_number_of_threads_is_named(own, request):
    request.addfinalizer(lambda: torch.set_num_threads(1))
    wide = ("--n_embd=128", "--stop_after_steps=8")
    train(own, "one", "clean", *wide)
    torch.set_num_threads(2)
    train(own, "two", "clean", *wide)
    logs = (history.read_log(own / "runs" / name) for name in ("one", "two"))
    one, two = (np.stack([log.column(n) for n in ("loss", "grad_norm")]) for log in logs)
    unlike = np.flatnonzero((one != two).any(axis=0)) + 1
    done = launch.call("bisect", "one", "two", f"--checkpoint_dir={own / 'runs'}")
    assert "threads 1 and 2" in done.stdout
    assert (": environment" in done.stdout) == (done.returncode == 1)
    if len(unlike):  # on some processors two threads add in the order of one
        assert done.returncode == 1
        assert f" step {unlike[0]}" in done.stdout
    # A replay takes as many threads as the run had.
    assert "bitwise as logged" in call("replay", own, "two", "--steps=6:8")


@pytest.mark.slow
def test_a_swapped_document_is_named(own):
    train(own, "swapped", "swapped", "--stop_after_steps=16")
    found = differing(own, "swapped")
    ids = [np.load(next((own / name).glob("*train*.npy"))) for name in ("clean", "swapped")]
    texts_of = [BYTES.decode(one.tolist()).split("<|endoftext|>") for one in ids]
    numbers = [n for n, (x, y) in enumerate(zip(*texts_of, strict=True)) if x != y]
    assert len(numbers) == 1
    assert (found["quantity"], found["replays"]) == ("batch", 0)
    text = dict(map(tuple, found["differences"]))["batch"]
    assert f"document {numbers[0]}; B " in text
    assert text.endswith(f"document {numbers[0]}")


@pytest.mark.slow
def test_a_run_of_two_ranks_replays_within_rounding(own):
    flags = [*flags_of(own, "ranks", "clean"), "--stop_after_steps=12"]
    assert launch.train_in_forks(flags, world=2).returncode == 0
    said = call("replay", own, "ranks", "--steps=10:12")
    assert "losses within 1e-5 and gradient norms within 1e-4" in said
    assert call("why-spike", own, "ranks", "--step=10").count("as logged") == 1
    # With exact reduction the order does not depend on the ranks.
    flags = [*flags_of(own, "exact", "clean"), "--reduce=exact", "--stop_after_steps=8"]
    assert launch.train_in_forks(flags, world=2).returncode == 0
    assert "bitwise as logged" in call("replay", own, "exact", "--steps=6:8")
