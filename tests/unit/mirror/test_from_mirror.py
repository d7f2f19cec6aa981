"""Runs with --checkpoint_mirror on a disk of this machine: what a start rejects, fetches, reports and waits for."""

import errno
import itertools
import shutil
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gpt2lab.checkpoint import store
from gpt2lab.errors import CheckpointError, ConfigError, DataError, SaveError
from gpt2lab.mirror.extension import (
    CheckpointMirror,
    _is_left_behind,
    fetch_on_this_machine,
    open_uploader,
    wait_limit,
)
from gpt2lab.mirror.storage import Copy, connect
from gpt2lab.runs import overview
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.saver import Saver
from gpt2lab.training.trainer import Trainer
from whole_run import Run

COMMON = ("--max_steps=6", "--checkpoint_freq=2", "--eval_freq=0", "--sample_freq=0")
UNWRITABLE = SaveError("metrics.jsonl cannot be written")
IN_STEP = "mirror: newest copy is step 6, newest checkpoint is step 6"


@pytest.fixture
def here(tiny_data, tmp_path, bucket) -> Run:
    return Run(tiny_data, tmp_path / "here", *COMMON, f"--checkpoint_mirror=file://{bucket}")


@pytest.fixture
def there(tiny_data, tmp_path, bucket) -> Run:
    """Return the run on another machine, which has nothing of it."""
    return Run(tiny_data, tmp_path / "there", *COMMON, f"--checkpoint_mirror=file://{bucket}")


@pytest.fixture
def mirrored(here) -> Run:
    """Return a run that has stopped after step 4 of 6, and is copied."""
    here.train("--stop_after_steps=4")
    return here


@pytest.mark.parametrize(("resume", "begun"), [("auto", 0), ("latest", 0), ("auto", 2)])
def test_a_new_machine_goes_on_with_the_same_bits(resume, begun, mirrored, there, run, capsys):
    run.train(*COMMON)
    for _ in range(begun):  # and ended before the first checkpoint
        there.killed("step:kill9@2", "--resume=auto", "--checkpoint_mirror=None")
    there.train(f"--resume={resume}")
    assert "fetching step 4" in capsys.readouterr().out
    assert (there.losses(), there.hashes(6)) == (run.losses(), run.hashes(6))
    (resumed,) = there.events("resume")
    assert (resumed["attempt"], resumed["level"]) == (2, "bit-identical")
    assert resumed["verified_batches"] == [4], "the log came with the copy"
    status = there.status()["mirror"]
    assert (status["step"], status["newest"], status["error"]) == (6, 6, None)
    assert overview.status_table(overview.read_runs(there.path.parent)).endswith(IN_STEP)


def test_a_checkpoint_alone_chooses_no_mirror(mirrored, tmp_path, bucket, monkeypatch, capsys):
    """Neither to fetch from nor to copy to: only a person does, on the machine where the run began or by a flag."""
    flags = [flag for flag in mirrored.flags if "mirror" not in flag]
    before = sorted(bucket.rglob("*"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    mirrored.flags = [*flags, "--stop_after_steps=5"]
    mirrored.train("--resume=latest")
    assert sorted(bucket.rglob("*")) == before
    assert any(f"file://{bucket}" in event["message"] for event in mirrored.events("warning"))
    assert "mirror" not in mirrored.status()
    monkeypatch.undo()
    mirrored.flags = flags
    mirrored.train("--resume=latest")
    assert mirrored.status()["mirror"]["step"] == 6


def test_a_clock_that_goes_back_hides_no_step(here, there, monkeypatch):
    readings = itertools.count(2e9, -3600)
    clock = SimpleNamespace(time=lambda: next(readings), monotonic=time.monotonic)
    monkeypatch.setattr(store, "time", clock)
    here.train("--stop_after_steps=4")
    times = [info.created for _, info in sorted(here.checkpoints().items())]
    assert times == sorted(times)
    there.train("--resume=auto")
    assert [event["from_step"] for event in there.events("resume")] == [4]


@pytest.mark.parametrize(
    ("events", "is_behind"),
    [
        ([("begin", 1, 0), ("checkpoint", 1, 10), ("begin", 2, 5)], True),
        ([("begin", 1, 0), ("checkpoint", 1, 10), ("begin", 2, 10)], False),
        ([("begin", 1, 0), ("checkpoint", 1, 10), ("rewind", 1, 5)], True),
        ([("checkpoint", 1, 10), ("rewind", 1, 5), ("checkpoint", 1, 10)], False),
        ([("begin", 1, 0)], False),  # killed before the event of the checkpoint, or another machine
    ],
)
def test_a_copy_is_left_behind_by_the_order_of_the_log(events, is_behind):
    """Each was written an hour before the one that precedes it, by the clock."""
    copy = Copy("step_00000010-12345678", {"step": 10, "attempt": 1, "created": 1e9})
    log = [
        {"event": event, "attempt": attempt, "step": step, "time": 2e9 - 3600 * place}
        for place, (event, attempt, step) in enumerate(events)
    ]
    assert _is_left_behind(copy, log) is is_behind


def test_a_damaged_newest_copy_is_passed_over_with_a_warning(mirrored, there, bucket):
    mirrored.train("--resume=latest", "--stop_after_steps=5")
    (folder,) = bucket.glob("tiny/step_00000005-*")
    (folder / "optim.safetensors").write_bytes(b"junk")
    there.train("--resume=auto")
    assert [event["from_step"] for event in there.events("resume")] == [4]
    assert any("step_00000005" in event["message"] for event in there.events("warning"))


@pytest.mark.usefixtures("mirrored")
def test_copies_of_which_none_is_sound_are_never_begun_afresh(there, bucket):
    for path in bucket.glob("tiny/step_*/state.json"):
        path.write_bytes(b"{}")
    assert "no sound checkpoint" in str(there.rejected("--resume=auto", kind=CheckpointError))
    assert not list(there.path.glob("step_*"))


@pytest.mark.usefixtures("mirrored")
def test_a_step_that_only_the_mirror_has_is_not_fetched(there):
    for wanted in ("2", "best"):
        said = str(there.rejected(f"--resume={wanted}", kind=CheckpointError))
        assert f"no checkpoint {wanted}; --resume latest fetches the newest one from f" in said


def test_damaged_checkpoints_here_are_replaced_from_the_mirror(mirrored, bucket):
    """And where they were deleted, a fresh start leaves the copies alone."""
    for path in mirrored.path.glob("step_*/state.json"):
        path.write_bytes(b"{}")
    mirrored.train("--resume=latest")
    assert mirrored.events("resume")[-1]["from_step"] == 4
    assert list(mirrored.path.glob("corrupt-step_00000004-*"))
    assert any("step_00000004" in event["message"] for event in mirrored.events("warning"))
    for path in mirrored.path.glob("step_*"):
        shutil.rmtree(path)
    before = sorted(bucket.rglob("*"))
    assert "--resume latest" in str(mirrored.rejected())
    assert sorted(bucket.rglob("*")) == before


def test_a_run_that_lost_its_log_is_told_what_to_do(mirrored, run):
    (mirrored.path / "metrics.jsonl").unlink()
    said = str(mirrored.rejected("--resume=latest", kind=ConfigError))
    assert f"move {mirrored.path} away and --resume latest" in said
    mirrored.path.rename(mirrored.path.parent / "away")
    mirrored.train("--resume=latest")
    run.train(*COMMON)
    assert mirrored.losses() == run.losses()


def test_a_mirror_that_is_the_runs_own_folder_is_rejected_before_anything_is_written(run, wording):
    assert wording(run.rejected(f"--checkpoint_mirror=file://{run.path.parent}", kind=ConfigError))
    assert not run.path.exists()


@pytest.mark.usefixtures("mirrored")
def test_another_run_of_the_name_is_rejected_before_anything_is_written(there, bucket):
    before = {path: path.stat().st_mtime_ns for path in bucket.rglob("*")}
    assert "another run of this name" in str(there.rejected(kind=ConfigError))
    assert not there.path.exists()
    there.flags = [flag for flag in there.flags if "mirror" not in flag]
    there.train("--stop_after_steps=2")
    rejection = there.rejected("--resume=auto", f"--checkpoint_mirror=file://{bucket}")
    assert "another run" in str(rejection)
    assert {path: path.stat().st_mtime_ns for path in bucket.rglob("*")} == before


def test_a_complete_run_brings_its_mirror_up_to_date(mirrored, bucket, capsys):
    mirrored.train("--resume=latest", "--checkpoint_mirror=None")
    assert not list(bucket.glob("tiny/step_00000006-*"))
    mirrored.train("--resume=latest", f"--checkpoint_mirror=file://{bucket}")
    assert IN_STEP in capsys.readouterr().out
    assert list(bucket.glob("tiny/step_00000006-*/manifest.json"))
    assert (mirrored.status()["state"], mirrored.status()["mirror"]["step"]) == ("completed", 6)
    before = mirrored.listing()
    mirrored.train("--resume=latest", f"--checkpoint_mirror=file://{bucket}")
    lock = {str(mirrored.path / "run.lock"): None}
    assert mirrored.listing() | lock == before | lock


@pytest.mark.parametrize("problem", ["locked", "unwritable"])
def test_a_complete_run_that_is_not_copied_is_complete(
    problem, mirrored, bucket, capsys, monkeypatch
):
    mirrored.train("--resume=latest", "--checkpoint_mirror=None")
    holder = RunFolder(mirrored.path) if problem == "locked" else None
    if problem == "unwritable":
        fail = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
        monkeypatch.setattr("gpt2lab.mirror.extension.replace_durably", fail)
    mirrored.train("--resume=latest", f"--checkpoint_mirror=file://{bucket}")
    if holder is not None:
        holder.close()
    output = capsys.readouterr()
    assert "already complete" in output.out
    (line,) = (line for line in output.err.splitlines() if "checkpoint mirror" in line)
    assert ("in use by" if holder else "Read-only") in line


def test_the_end_of_a_complete_run_waits_no_longer_than_others_do(mirrored, bucket, monkeypatch):
    limits: list[float] = []

    def note(signals: Any, deadlines: Any, *, most: float, has_failed: bool) -> Any:
        limits.append(most)
        return lambda: False

    mirrored.train("--resume=latest", "--checkpoint_mirror=None")
    monkeypatch.setattr("gpt2lab.mirror.extension.wait_limit", note)
    flags = ("--resume=latest", f"--checkpoint_mirror=file://{bucket}")
    mirrored.train(*flags, "--pg_timeout_minutes=2")
    assert limits == [60.0]


def test_a_folder_lost_after_it_was_checked_stops_no_run(here, bucket, monkeypatch):
    def lose(*args: Any) -> Any:
        bucket.rmdir()
        return open_uploader(*args)

    monkeypatch.setattr("gpt2lab.mirror.extension.open_uploader", lose)
    here.train()
    assert here.status()["state"] == "completed"
    assert "create it" in here.status()["mirror"]["error"]
    assert not bucket.exists()


def test_an_error_of_the_mirror_hides_no_earlier_one(here, monkeypatch):
    closed: list[bool] = []
    close = MetricsLogger.close
    monkeypatch.setattr(MetricsLogger, "close", lambda self: closed.append(True) or close(self))
    monkeypatch.setattr(CheckpointMirror, "_report", Mock(side_effect=UNWRITABLE))
    monkeypatch.setattr(Trainer, "fit", Mock(side_effect=DataError("the first error")))
    assert str(here.rejected()) == "the first error"
    assert closed


def test_a_rescue_whose_event_cannot_be_written_has_worked(run, monkeypatch):
    def fail_first(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(Saver, "_report", Mock(side_effect=UNWRITABLE))
        raise RuntimeError("the first error")

    monkeypatch.setattr(Saver, "save", fail_first)
    with pytest.raises(RuntimeError, match="the first error"):
        run.train(*COMMON)
    assert {step: info.kind for step, info in run.checkpoints().items()} == {2: "emergency"}


class Broken(MemoryFileSystem):
    protocol = "broken"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        raise PermissionError("Access Denied")


def test_a_mirror_that_cannot_be_read_stops_only_a_start_that_needs_it(tiny_data, tmp_path):
    fsspec.register_implementation("broken", Broken, clobber=True)
    run = Run(tiny_data, tmp_path / "here", *COMMON, "--checkpoint_mirror=broken://bucket")
    assert "cannot be read (PermissionError: Access Denied)" in str(run.rejected("--resume=auto"))
    assert not run.path.exists()
    run.train("--stop_after_steps=4")
    run.train("--resume=auto")
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("completed", 0)
    assert status["mirror"]["step"] is None
    assert status["mirror"]["error"] == "PermissionError: Access Denied"
    for attempt, said in ((1, "not reached"), (2, "continues from its own step 4")):
        messages = [event["message"] for event in run.events("warning", attempt)]
        assert sum("not copied" in message for message in messages) == 1
        assert any(said in message for message in messages)


def test_another_machine_of_the_run_fetches_what_rank_zero_chose(mirrored, tmp_path, bucket):
    chosen = mirrored.checkpoints()[4]
    run_dir = tmp_path / "node1" / "tiny"
    chosen_there = SimpleNamespace(path=run_dir / chosen.path.name, manifest=chosen.manifest)
    settings = SimpleNamespace(checkpoint=SimpleNamespace(checkpoint_mirror=f"file://{bucket}"))
    start: Any = SimpleNamespace(config=settings, checkpoint=chosen_there, run_dir=run_dir)
    fetch_on_this_machine(start)
    for path in chosen.path.iterdir():
        assert (chosen_there.path / path.name).read_bytes() == path.read_bytes()
    shutil.rmtree(run_dir)
    for copy in connect(f"file://{bucket}", "tiny").list_copies()[0]:
        shutil.rmtree(bucket / "tiny" / copy.name)
    with pytest.raises(CheckpointError, match="not on this machine's disk"):
        fetch_on_this_machine(start)


@pytest.mark.parametrize(
    ("level", "seconds_ago", "deadline", "has_failed", "waits"),
    [
        (0, 0.0, None, False, True),
        (0, 0.0, -1.0, False, False),  # a deadline has passed
        (1, 1.0, None, False, True),
        (1, 21.0, None, False, False),  # 30 s after the signal a launcher kills
        (2, 1.0, None, False, False),  # asked twice
        (0, 0.0, None, True, True),
    ],
)
def test_the_end_waits_while_it_may(level, seconds_ago, deadline, has_failed, waits, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    now = time.monotonic()
    signals: Any = SimpleNamespace(level=level, asked_at=now - seconds_ago)
    deadlines = {} if deadline is None else {"stop_at": now + deadline}
    may_wait = wait_limit(signals, deadlines, most=1000.0, has_failed=has_failed)
    assert may_wait() is waits
