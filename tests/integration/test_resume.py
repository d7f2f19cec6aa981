"""Killed and resumed equals never stopped: the same bits at the same world, the same tokens at another."""

import functools
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import launch
from gpt2lab.checkpoint.catalog import read_labels
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.errors import CheckpointError
from tiny import flags_for, write_shards
from whole_run import Run

# T = 16, S = 8 windows a step. The training shards of tiny_data have 62, 48 and 80 windows: shard ends after
# 7.75, 13.75 and 23.75 steps, and the epoch ends within step 24.
MID_SHARD, SHARD_END, ACROSS_EPOCH, LAST = 10, 8, 24, 34
WHOLE = {"max_steps": LAST, "eval_freq": 5, "checkpoint_freq": 1}
SHORT = ("--max_steps=8", "--checkpoint_freq=3", "--eval_freq=0")
ENDLESS = {"eval_freq": 0, "sample_freq": 0, "checkpoint_freq": 0, "max_steps": 100_000}


@pytest.fixture(scope="module")
def reference(tiny_run) -> Callable[..., Run]:
    """Return a function from a world size and settings to their run that was never stopped."""
    return functools.cache(lambda world, **more: tiny_run(world=world, **WHOLE, **more))


def from_steps(run: Run) -> list[int]:
    return [event["from_step"] for event in run.events("resume")]


@pytest.mark.parametrize(
    ("world", "cut", "settings"),
    [
        (1, ACROSS_EPOCH, {}),
        (1, SHARD_END, {"optimizer": "muon", "muon_lr": 0.01, "lr_schedule": "wsd"}),
        *launch.slow((1, MID_SHARD, {}), (2, SHARD_END, {}), (1, MID_SHARD, {"dropout": 0.2})),
        *launch.slow((1, SHARD_END, {"model": "speedrun"})),
    ],
)
def test_kill_and_resume_is_bit_identical(world, cut, settings, reference, run):
    """Killed just before step `cut + 1` and resumed: every loss, weight and moment is the same bits."""
    expected = reference(world, **settings)
    run.flags += flags_for(**WHOLE, **settings)
    run.killed(f"step:kill9@{cut + 1}", world=world)
    assert max(run.losses()) == cut
    run.train("--resume=latest", world=world)
    [event] = run.events("resume")
    assert (event["from_step"], event["level"], event["changes"]) == (cut, "bit-identical", {})
    assert run.bits() == expected.bits()
    for kind, key in (("step", "batch_hash"), ("eval", "val_loss")):
        found = [{e["step"]: e[key] for e in one.events(kind)} for one in (run, expected)]
        assert found[0] == found[1]


@pytest.mark.slow
def test_the_first_resumed_step_sums_like_all_others(tiny_run):
    """From three processes on DDP's first step would add in another order: only the weights' hash shows it."""
    shape = {"total_batch_size": 192, "mini_batch_size": 1, "max_steps": 12, "world": 3}
    straight, cut = tiny_run(**shape), tiny_run(stop_after_steps=6, **shape)
    cut.train("--resume=latest", "--stop_after_steps=12", world=3)
    assert [event["level"] for event in cut.events("resume")] == ["bit-identical"]
    assert cut.bits() == straight.bits()


def end(process, run: Run, step: int, number: signal.Signals) -> tuple[str, str]:
    """Send a signal once a step is logged, wait for the end, and return what was said."""
    try:
        launch.wait_for_step(process, run.path, step)
        process.send_signal(number)
        return process.communicate(timeout=launch.HANG_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_world_size_left_over_in_the_environment_is_no_rank(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run.train(*SHORT, "--stop_after_steps=4")
    run.train("--resume=latest")
    assert [event["world_size"] for event in run.events("resume")] == [1]


def test_a_signal_cuts_an_evaluation_short_and_the_step_is_saved(tiny_run, tmp_path):
    """An evaluation may take minutes, a scheduler waits 30 seconds; the resumed run makes up for it."""
    data = write_shards(tmp_path / "data", train=(4_000,), val=(800_000,))
    run = tiny_run(data=data, max_steps=8, eval_freq=4, checkpoint_freq=1, stop_after_steps=2)
    long = ["--val_tokens=800000", "--mini_batch_size=1", "--resume=latest"]
    process = launch.start([*run.flags, *long, "--stop_after_steps=8"])
    end(process, run, 4, signal.SIGTERM)  # its evaluation of 50,000 windows is under way
    assert process.returncode == 0
    assert [(e["step"], e["reason"]) for e in run.events("stop")][-1] == (4, "SIGTERM")
    assert [event["step"] for event in run.events("eval")] == [0]
    run.train("--resume=latest", "--stop_after_steps=8")
    assert [event["step"] for event in run.events("eval")] == [0, 4, 8]


def test_a_loss_of_other_windows_is_never_the_best(tiny_run):
    run = tiny_run(max_steps=8, eval_freq=2, checkpoint_freq=2, stop_after_steps=4, val_tokens=16)
    assert read_labels(run.path)["best"] == folder_name(4)
    run.train("--resume=latest", "--val_tokens=640", "--stop_after_steps=8")
    of_one, of_all = [[e["val_loss"] for e in run.events("eval")][at] for at in (2, 4)]
    assert of_one < of_all
    assert read_labels(run.path)["best"] == folder_name(8)


@pytest.mark.slow
def test_compiled_steps_on_many_threads_resume_bit_identically(tiny_run, tmp_path):
    """As a user runs it: compiled, bf16 where there is one, all threads. Compiled sums once raced."""
    run = tiny_run(data=write_shards(tmp_path / "data", train=(40_000,), val=(2_000,)))
    run.flags += ["--n_embd=128", "--context_length=128", "--mini_batch_size=8", "--dtype=auto"]
    run.flags += ["--total_batch_size=2048", "--compile=on", "--val_tokens=1024", "--max_steps=8"]
    run.flags += ["--checkpoint_freq=1", "--eval_freq=0"]
    assert launch.train(run.flags, OMP_NUM_THREADS="2").returncode == 0
    bits = run.bits()
    assert launch.train([*run.flags, "--resume=1"], OMP_NUM_THREADS="2").returncode == 0
    assert (from_steps(run), run.bits()) == ([1], bits)


@pytest.mark.slow
def test_resume_on_fewer_processes_sees_the_same_tokens(reference, run):
    """4 -> 2 -> 1 processes: identical batches, losses to 1e-5 of the run that never stopped."""
    run.flags += flags_for(**WHOLE)
    for world, stop in ((4, 10), (2, 20), (1, LAST)):
        run.train("--resume=auto", f"--stop_after_steps={stop}", world=world)
    assert [event["world_size"] for event in run.events("resume")] == [2, 1]
    assert {event["level"] for event in run.events("resume")} == {"same data"}
    run.assert_same_curve(reference(1), LAST)


def test_a_signal_is_answered_and_stops_at_a_step_that_is_saved(run):
    """It is on disk, and nothing is lost; faults/test_stop_and_time.py asks two processes, and by other signals."""
    run.flags += flags_for(**ENDLESS)
    process = launch.start(run.flags, stdout=subprocess.PIPE)
    said, errors = end(process, run, 5, signal.SIGINT)
    assert (process.returncode, launch.without_progress(errors)) == (0, "")
    [answer] = [line for line in said.splitlines() if line.endswith("; press twice more to abort")]
    assert re.match(r"(finishing|stopping after) (the checkpoint of )?step \d+", answer)
    [stop] = run.events("stop")
    assert (stop["reason"], stop["step"]) == ("SIGINT", max(run.losses()))
    assert Path(stop["checkpoint"]).name == f"step_{stop['step']:08d}"
    [saved] = run.events("checkpoint")
    assert (saved["kind"], saved["step"]) == ("emergency", stop["step"])
    last = stop["step"] + 2
    run.train("--resume=latest", f"--stop_after_steps={last}")
    assert sorted(run.losses()) == list(range(1, last + 1))


STAGES = ("model.safetensors", "optim.safetensors", "state.json", "manifest.json", "before_rename")


@pytest.mark.parametrize(
    ("stage", "newest"), [*((stage, 3) for stage in STAGES), ("after_rename", 6)]
)
def test_a_kill_inside_a_save_leaves_the_checkpoint_that_has_a_name(stage, newest, run):
    run.flags += SHORT
    run.killed(f"checkpoint.{stage}:kill9@6")
    assert max(path.name for path in run.path.glob("step_*")) == f"step_{newest:08d}"
    assert newest == 6 or list(run.path.glob(".tmp-*")), "the kill was to land inside the save"
    run.train("--resume=latest")
    assert from_steps(run) == [newest]
    assert not list(run.path.glob(".tmp-*")), "leftovers are swept at the next start"


@pytest.fixture
def damaged(tiny_run) -> Run:
    """Return a run of 6 steps to damage, which stopped at 4 and holds steps 2 and 4."""
    return tiny_run(max_steps=6, checkpoint_freq=2, eval_freq=0, stop_after_steps=4)


def test_a_resume_past_a_damaged_checkpoint_says_so_and_goes_on(damaged, capsys):
    path = damaged.path / "step_00000004" / "optim.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    damaged.train("--resume=latest")
    assert from_steps(damaged) == [2]
    assert any(path.name in event["message"] for event in damaged.events("warning"))
    assert path.name in capsys.readouterr().out
    assert len(list(damaged.path.glob("corrupt-step_00000004*"))) == 1, "kept for inspection"


def test_resume_rejects_when_every_checkpoint_is_damaged(damaged):
    """Starting over in silence would be the worst answer; what one start does is not to change the next one's."""
    for path in damaged.path.glob("step_*/model.safetensors"):
        path.write_bytes(b"")
    for resume in ("latest", "auto", "latest"):
        assert isinstance(damaged.rejected(f"--resume={resume}"), CheckpointError)
    assert list(damaged.losses()) == [1, 2, 3, 4]
