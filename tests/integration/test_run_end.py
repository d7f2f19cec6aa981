"""How a start of a run ends: done, stopped, rejected, with a full disk or device; what it leaves and says."""

import errno
import os
import subprocess
import warnings
from typing import Any

import pytest
import torch

import launch
from gpt2lab.errors import NonFiniteError, OutOfMemoryError, SaveError
from gpt2lab.optim.optimizers import AdamW
from gpt2lab.runs.summary import describe_run
from gpt2lab.training import steps
from plain_log import read_events
from whole_run import LAST


def test_completed_run_says_so_in_its_status_and_in_its_last_event(straight):
    status = straight.status()
    assert (status["state"], status["step"], status["exit_code"]) == ("completed", LAST, 0)
    done = read_events(straight.path)[-1]
    steps = straight.events("step")
    assert (done["event"], done["step"]) == ("done", LAST)
    assert done["reason"]
    assert done["checkpoint"] == str(straight.path / f"step_{LAST:08d}")
    assert done["loss"] == steps[-1]["loss"]
    assert done["val_loss"] == straight.events("eval")[-1]["val_loss"]
    assert done["seconds"] == pytest.approx(sum(event["step_seconds"] for event in steps))


@pytest.mark.parametrize(
    ("place", "thread"), [("model.safetensors", "off"), ("before_rename", "on")]
)
def test_full_disk_at_a_rolling_checkpoint_warns_and_training_goes_on(
    place, thread, run, monkeypatch
):
    monkeypatch.setenv("FAULT", f"checkpoint.{place}:enospc@4")
    more = f"--async_checkpoint={thread}"
    run.train("--max_steps=6", "--checkpoint_freq=2", "--eval_freq=0", more)
    assert (list(run.losses()), list(run.checkpoints())) == ([1, 2, 3, 4, 5, 6], [2, 6])
    [warning] = [e["message"] for e in run.events("warning") if "not saved" in e["message"]]
    assert warning.startswith("checkpoint of step 4 not saved: [Errno 28] No space left on device")
    assert [event["step"] for event in run.events("checkpoint")] == [2, 6]
    assert not list(run.path.glob(".*")), "nothing half-written is left"


@pytest.mark.parametrize("planned", ["--max_steps=4", "--stop_after_steps=4"])
def test_full_disk_where_the_process_ends_is_an_error(run, monkeypatch, planned):
    common = ["--max_steps=9", "--checkpoint_freq=3", "--eval_freq=0", planned]
    monkeypatch.setenv("FAULT", "checkpoint.model.safetensors:enospc@4")
    rejection = run.rejected(*common, kind=SaveError)
    assert rejection.exit_code == 75
    assert str(rejection).endswith("and resume from the checkpoint before")
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 75)
    assert list(run.checkpoints()) == [3]
    monkeypatch.delenv("FAULT")
    run.train(*common, "--resume=latest")
    assert (list(run.checkpoints()), run.losses(attempt=1)[4]) == ([3, 4], run.losses(attempt=2)[4])


def test_a_full_disk_at_the_only_checkpoint_sends_nobody_to_one_before(run, monkeypatch):
    monkeypatch.setenv("FAULT", "checkpoint.model.safetensors:enospc@2")
    rejection = run.rejected("--max_steps=2", "--eval_freq=0", kind=SaveError)
    assert str(rejection).endswith("free space, or repair the disk, and start again")


@pytest.mark.parametrize(
    ("file", "number"),
    [("config.json", errno.ENOSPC), ("status.json", errno.ENOSPC), ("config.json", errno.EIO)],
)
def test_a_disk_full_at_the_start_is_one_line_and_leaves_nothing(
    run, monkeypatch, file, number, wording
):
    run.train("--max_steps=4", "--stop_after_steps=2", "--eval_freq=0")
    before = run.listing().keys()
    real = os.fsync

    def full(descriptor: int) -> None:
        if f".{file}." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    rejection = run.rejected("--max_steps=4", "--resume=latest", kind=SaveError)
    wording(rejection)
    assert run.listing().keys() == before
    monkeypatch.undo()
    run.train("--max_steps=4", "--resume=latest")


def test_a_stop_before_anything_was_saved_names_no_resume(run, capsys):
    run.train("--max_steps=4", "--max_hours=1e-9")
    report = capsys.readouterr().out.split("run tiny\n")[1]
    assert "--resume" not in report
    assert "start again" in report
    run.train("--max_steps=4")


@pytest.mark.slow
def test_a_closed_console_does_not_end_a_run(tmp_path, tiny_flags):
    """`python src/train.py ... | head` once ended training and reported success."""
    flags = [*tiny_flags, "--max_steps=20", "--log_freq=1"]
    command = launch.command_for(launch.TRAIN, flags, world=1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=launch.environment()) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=launch.HANG_SECONDS) == 0
    assert [event["step"] for event in launch.events(tmp_path / "runs" / "tiny", "done")] == [20]
    assert "step 20/20" in (tmp_path / "runs" / "tiny" / "log.txt").read_text()


def test_a_rejected_start_leaves_the_run_unlocked(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        run.train("--max_steps=2")
    with pytest.raises(NonFiniteError) as kept:
        more = ("--max_lr=1e30", "--min_lr=1e30", "--allow_change=max_steps,max_lr,min_lr")
        run.train("--resume=latest", "--max_steps=3", *more)
    assert kept.value.__traceback__ is not None  # its frames are alive, the lock must not be
    run.train("--resume=latest", "--max_steps=4", "--allow_change=max_steps")


def test_a_non_finite_evaluation_ends_as_non_finite_and_saves_nothing_of_the_step(run):
    rejection = run.rejected(
        *("--max_steps=1", "--max_lr=1e20", "--min_lr=1e20", "--warmup_steps=0", "--eval_freq=1")
    )
    assert isinstance(rejection, NonFiniteError)
    assert (run.status()["exit_code"], run.checkpoints()) == (76, {})
    assert "validation loss" in describe_run(run.path)


def test_an_error_after_the_commit_does_not_disown_the_checkpoint(run, monkeypatch):
    monkeypatch.setenv("FAULT", "checkpoint.after_rename:enospc@2")
    run.train("--max_steps=4", "--eval_freq=2", "--checkpoint_freq=2")
    assert [e["step"] for e in run.events("checkpoint")] == sorted(run.checkpoints()) == [2, 4]


def test_every_start_ends_with_a_report_that_says_how_to_go_on(run, capsys):
    run.train("--max_steps=4", "--eval_freq=2", "--stop_after_steps=2")
    report = capsys.readouterr().out.split("run tiny\n")[1]
    for part in ("training loss", "validation loss", "tokens/s", "checkpoints", "--resume latest"):
        assert part in report
    assert "--allow_change" not in report
    run.train("--resume=latest", "--max_steps=4")
    report = capsys.readouterr().out.split("run tiny\n")[1]
    assert "--max_steps 8 --allow_change max_steps" in report
    assert report in (run.path / "log.txt").read_text()
    before = run.listing()
    run.train("--resume=latest", "--max_steps=4")
    assert "already complete" in capsys.readouterr().out
    assert run.listing() == before, "a finished run that is resumed unchanged writes nothing"


@pytest.mark.parametrize(
    ("where", "saved"),
    [
        ("the step", [1]),
        ("the update", []),  # it makes the state, and what moved by then is not saved
    ],
)
def test_a_full_device_ends_in_one_line_with_the_lever(where, saved, run, monkeypatch):
    owner, name = (steps, "train_step") if where == "the step" else (AdamW, "step")
    plain, taken = getattr(owner, name), []

    def call(*args: Any, **options: Any) -> Any:
        if taken or where == "the update":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB.\nGPU 0 has ...")
        taken.append(plain(*args, **options))
        return taken[0]

    monkeypatch.setattr(owner, name, call)
    rejection = run.rejected("--max_steps=3", kind=OutOfMemoryError)
    assert rejection.exit_code == 1
    assert "2.00 GiB" in str(rejection)
    assert ("--mini_batch_size" in str(rejection), "\n" in str(rejection)) == (True, False)
    assert list(run.checkpoints()) == saved
    monkeypatch.undo()
    run.train("--resume=auto", "--mini_batch_size=1", "--max_steps=3")
    assert run.status()["state"] == "completed"


def test_stop_after_steps_saves_and_leaves_the_schedule_alone(run, straight):
    common = [f"--max_steps={LAST}", "--eval_freq=0", "--checkpoint_freq=0"]
    run.train(*common, "--stop_after_steps=3")
    assert list(run.checkpoints()) == [3]
    status, stop = run.status(), read_events(run.path)[-1]
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", 3, 0)
    assert (stop["event"], stop["reason"]) == ("stop", "stop_after_steps")
    assert stop["checkpoint"] == str(run.path / "step_00000003")
    assert run.rejected(*common, "--resume=latest", "--stop_after_steps=3").exit_code == 2
    run.train(*common, "--resume=latest", "--stop_after_steps=7")
    assert run.losses() == {n: loss for n, loss in straight.losses().items() if n <= 7}
    assert [event["step"] for event in run.events("eval")] == [0], "a stop is not the last step"
