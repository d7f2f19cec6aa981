"""Row 36 and on: the folder, the data and the process itself change under a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import PACE, FaultRun, python_program

pytestmark = pytest.mark.fault

Reference = Callable[[int], FaultRun]
LOST = 75  # nothing more can be saved
FOREVER = ("--checkpoint_freq=5", "--eval_freq=0", "--max_steps=100000")


def the_line(run: FaultRun) -> str:
    """Return the one line that the last start's first rank wrote to stderr, without torchrun's own."""
    assert "src/gpt2lab/" not in run.errors(), "a stack of ours"
    [line] = {line for line in run.errors().splitlines() if line.startswith("error: ")}
    return line


# -- the folder ------------------------------------------------------------------------------------------------------


def test_row_36_a_deleted_lock_lets_nobody_else_in(run: FaultRun) -> None:
    """It is made again within a step: a second start is rejected, and every step is recorded once."""
    run.flags = FOREVER
    process = run.start(FAULT=PACE)
    run.wait_for(process, "step", 3)
    lock = run.path / "run.lock"
    before = lock.stat().st_ino
    lock.rename(lock.with_suffix(".gone"))  # its number cannot be given to the new file
    run.wait_until(process, lambda: lock.exists() and bool(lock.read_text()), "a new lock")
    assert lock.stat().st_ino != before
    assert run.finish("--resume=auto", "--stop_after_steps=400") == 2
    assert f"in use by process {process.pid} on " in the_line(run)
    process.send_signal(signal.SIGTERM)
    assert run.end_of(process) == 0
    taken = [event["step"] for event in run.events("step")]
    assert taken == list(range(1, max(run.saved()) + 1))
    [warning] = [text for e in run.events("warning") if "run.lock" in (text := e["message"])]
    assert "was deleted while training, and is made again" in warning


@pytest.mark.parametrize("world", [1, 2])
def test_row_36_who_finds_the_lock_of_another_start_writes_nothing_more(
    world: int, run: FaultRun
) -> None:
    """The other one may be in the middle of anything; its lock, its lines and its status are left alone."""
    run.flags = FOREVER
    process = run.start(world=world, FAULT=PACE)
    run.wait_for(process, "checkpoint", 5)
    new = run.path / "new.lock"
    new.write_text("process 1 on elsewhere\n")
    with open(new) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        new.rename(run.path / "run.lock")
        code = run.end_of(process)
    assert code == (LOST if world == 1 else 1)
    run.assert_no_process_left(process)
    assert "another start took this run while this one trained" in the_line(run)
    assert (run.path / "run.lock").read_text() == "process 1 on elsewhere\n"
    assert run.events("stop") == []
    assert run.status()["state"] == "running"
    assert run.saved() == [event["step"] for event in run.events("checkpoint")][-len(run.saved()) :]


@pytest.mark.parametrize(
    ("how", "world"), [("moved", 1), ("moved", 2), ("deleted", 1), ("replaced", 1)]
)
def test_row_36_a_folder_that_goes_is_one_line(how: str, world: int, run: FaultRun) -> None:
    """At the next step, not at the next save; nothing is made anew in its place."""
    run.flags = ("--checkpoint_freq=20", "--eval_freq=0", "--max_steps=100000")
    process = run.start(world=world, FAULT=PACE)
    run.wait_for(process, "step", 3)
    away = run.folder / "away"
    run.path.rename(away)
    if how == "replaced":
        run.path.mkdir()
    if how == "deleted":
        shutil.rmtree(away)
    code = run.end_of(process)
    assert code == (LOST if world == 1 else 1)
    run.assert_no_process_left(process)
    assert f"{run.path}: moved or deleted while training" in the_line(run)
    assert not run.path.exists() or list(run.path.iterdir()) == []
    if how == "deleted":
        return
    if how == "replaced":
        run.path.rmdir()
    away.rename(run.path)
    assert run.saved() == [], "it did not wait for the save of step 20"
    assert run.finish("--resume=auto", "--stop_after_steps=20", world=world) == 0, run.errors()
    assert run.saved() == [20]


# -- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_row_37_a_stopped_run_goes_on(
    world: int, run: FaultRun, reference: Reference, tmp_path: Path
) -> None:
    """SIGSTOP, as Ctrl+Z, for longer than --hang_seconds; in a step that goes on for a while afterwards."""
    program = python_program(
        tmp_path,
        "import time\nimport gpt2lab.training.trainer as t\nplain = t.train_step\n"
        "def step(model, o, batch, *a, **k):\n"
        "    for _ in range(75 if batch.first_sample == 8 * 11 else 0):\n        time.sleep(0.02)\n"
        "    return plain(model, o, batch, *a, **k)\nt.train_step = step",
    )
    process = run.start("--hang_seconds=5", world=world, program=program, FAULT=PACE)
    run.wait_for(process, "step", 11)
    ids = [process.pid, *run.workers(process).values()]
    for signal_number in (signal.SIGSTOP, signal.SIGCONT):
        for process_id in ids:
            os.kill(process_id, signal_number)
        if signal_number == signal.SIGSTOP:
            time.sleep(7)
    assert run.end_of(process) == 0, run.errors()
    run.assert_equals(reference(world))
