"""A resume compares what it is about to do with what the run recorded, and rejects what differs."""

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import launch
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.config.schema import Config
from gpt2lab.errors import CheckpointError
from gpt2lab.model import rng
from gpt2lab.runs.overview import read_run
from gpt2lab.training import resume_check
from gpt2lab.training.resolve import resolve
from tiny import parse, write_shards
from whole_run import Run, reseal

COMMON = ("--max_steps=8", "--eval_freq=0", "--checkpoint_freq=3", "--warmup_steps=2")


def crash_after(run: Run, step: int, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    monkeypatch.setenv("FAULT", f"step:raise@{step + 1}")
    with pytest.raises(RuntimeError, match="fault point"):
        run.train(*COMMON, *more)
    monkeypatch.delenv("FAULT")


def test_both_the_last_and_the_replayed_batch_are_compared(run, monkeypatch, capsys):
    crash_after(run, 5, monkeypatch)
    run.train(*COMMON, "--resume=3")
    [event] = run.events("resume")
    assert event["verified_batches"] == [3, 4]
    assert event["verified_lr"] == run.events("step", attempt=1)[2]["lr"]
    assert (event["saved_world_size"], event["world_size"]) == (1, 1)
    said = capsys.readouterr().out
    assert "batch of step 3 and 4 read again: the hash is the logged one" in said
    assert "resumed from step 3 (bit-identical)" in said
    by_two = resume_check.ResumeCheck(3, 2, 1, {}, "same data", [], None).describe()
    assert "world size   1 -> 2\n" in by_two


@pytest.mark.parametrize("left", [None, 0, 4])  # of the lines; None: no file
def test_a_log_that_is_gone_is_a_warning_and_the_starts_are_counted_on(run, left):
    run.train(*COMMON, "--stop_after_steps=2")
    run.train("--resume=latest", "--stop_after_steps=4")
    path = run.path / "metrics.jsonl"
    if left is None:
        path.unlink()
    else:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:left]))
    run.train("--resume=latest")
    assert {event["attempt"] for event in run.events("done")} == {3}
    (warning,) = [e["message"] for e in run.events("warning") if "metrics.jsonl" in e["message"]]
    assert "step 4" in warning


def test_what_was_changed_is_not_called_unlogged(run, tmp_path, capsys):
    run.train(*COMMON, "--stop_after_steps=3")
    capsys.readouterr()
    run.train("--resume=3", "--max_lr=1e-4", "--allow_change=max_lr", "--stop_after_steps=4")
    said = capsys.readouterr().out
    assert "batch of step 3 read again: the hash is the logged one" in said
    assert "rate         not compared with the log, because settings changed" in said
    write_shards(tmp_path / "others", train=(4000,), val=(2000,))
    others = ["--resume=3", f"--data_dir={tmp_path / 'others'}", "--stop_after_steps=4"]
    assert re.search(r": data \w{12} -> \w{12}, data_dir .*others;", str(run.rejected(*others)))
    run.train(*others, "--allow_change=data")
    assert read_run(run.path).val_loss is None, "those before are of other data"
    said = capsys.readouterr().out
    assert "data         other batches from here on: data changed" in said
    assert re.search(r"changed +data: [0-9a-f]{12} -> [0-9a-f]{12}\n", said)


@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (3, {"batch_hash": "0" * 64}, "step 3 would read another batch"),
        (4, {"batch_hash": "0" * 64}, "step 4 would read another batch"),
        (3, {"lr": 0.5}, "learning rate of step 3"),
        (3, {"loss_scale": 1.0}, "loss scale after step 3"),
    ],
)
def test_a_difference_is_rejected_before_any_write(step, values, message, run, monkeypatch):
    crash_after(run, 5, monkeypatch)
    launch.edit_step(run.path, step, **values)
    before = run.listing()
    rejection = run.rejected(*COMMON, "--resume=3", kind=CheckpointError)
    assert message in str(rejection)
    assert rejection.exit_code == 2
    after = run.listing()
    lock = str(run.path / "run.lock")
    assert after | {lock: None} == before | {lock: None}


def test_a_rate_that_another_systems_cosine_rounds_otherwise_is_the_logged_one(run, monkeypatch):
    crash_after(run, 5, monkeypatch)
    lr = launch.steps(run.path)[3]["lr"]
    launch.edit_step(run.path, 3, lr=math.nextafter(lr, 1))
    run.train(*COMMON, "--resume=3", "--stop_after_steps=4")
    launch.edit_step(run.path, 3, lr=lr * (1 + 1e-9))
    assert "learning rate of step 3" in str(run.rejected(*COMMON, "--resume=3"))


def test_other_tokens_behind_the_same_names_and_sizes_are_found_out(tmp_path, monkeypatch):
    """Foreign shards have no hashes: their fingerprint is names and sizes, and stays the same."""
    data = write_shards(tmp_path / "data", train=(1003, 777), val=(650,))
    run = Run(data, tmp_path)
    crash_after(run, 5, monkeypatch)
    path = next(iter(sorted(data.glob("*train_000000.npy"))))
    np.save(path, np.load(path)[::-1].copy())
    assert "would read another batch" in str(run.rejected(*COMMON, "--resume=latest"))


def test_a_line_that_took_other_data_on_purpose_is_no_evidence(run, tmp_path, monkeypatch):
    crash_after(run, 5, monkeypatch)
    other = write_shards(tmp_path / "other", train=(900, 1200), val=(650,))
    changed = (f"--data_dir={other}", "--allow_change=data")
    asked = parse([*run.flags, *COMMON, "--resume=3", *changed])
    start = resolve(asked, world_size=1, set_aside=False)
    assert start.end_sample == (8 - 3) * start.plan.batch.samples, "from their first sample on"
    run.train(*COMMON, "--resume=3", *changed, "--stop_after_steps=6")
    run.train(*COMMON, "--resume=3")
    assert run.events("resume")[-1]["verified_batches"] == [3]


@pytest.mark.parametrize(("fixed", "level"), [(True, "bit-identical"), (False, "same data")])
def test_the_same_bits_are_promised_where_kernels_are_deterministic(fixed, level):
    there = {"environment": {"deterministic": fixed, "world_size": 1}}
    start: Any = SimpleNamespace(
        **{"changes": {}, "config": Config(), "checkpoint": SimpleNamespace(manifest=there)}
    )
    assert resume_check._level(start, there) == level


@pytest.mark.parametrize("on_gpu", ["before", "now"])
def test_a_run_goes_on_on_another_kind_of_device(on_gpu, run, monkeypatch):
    """One side has a GPU's generator, played by a state of that name, and the other has none to compare it with."""
    capture = rng.capture

    def with_gpu(device: torch.device) -> dict[str, Any]:
        return {**capture(device), "cuda": "AAAA"}

    monkeypatch.setattr(rng, "capture", with_gpu if on_gpu == "before" else capture)
    run.train(*COMMON, "--stop_after_steps=3")
    monkeypatch.setattr(rng, "capture", capture if on_gpu == "before" else with_gpu)
    run.train(*COMMON, "--resume=latest")
    assert [event["from_step"] for event in run.events("resume")] == [3]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"torch": "2.9.0"}, [f"torch '2.9.0' -> '{torch.__version__}'"]),
        ({"device": "another", "threads": 77}, ["processor 'another' -> ", "threads 77 -> "]),
        ({"loss_kernel": "triton"}, ["loss_kernel 'triton' -> None"]),
        ({"attention": "flash"}, ["attention 'flash' -> None"]),
        ({"threads": True, "torch": ["\x1b[2J" * 99]}, ["torch ['\\x1b[2J", "threads True -> "]),
    ],
)
def test_another_system_than_the_checkpoints_is_a_warning(run, values, said):
    """Also where somebody edited the manifest and made its hash anew."""
    run.train(*COMMON, "--stop_after_steps=3")
    reseal(run.path / folder_name(3), lambda content: content["environment"].update(values))
    run.train(*COMMON, "--stop_after_steps=4", "--resume=latest")
    assert [e["level"] for e in run.events("resume", 2)] == ["same data"]
    [warning] = [e["message"] for e in run.events("warning", 2) if "resumed on" in e["message"]]
    assert "\n" not in warning
    assert all(part in warning for part in said)
    run.train(*COMMON, "--stop_after_steps=5", "--resume=latest")
    assert not any("resumed on" in event["message"] for event in run.events("warning", 3))
