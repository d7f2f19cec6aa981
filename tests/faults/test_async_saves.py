"""Row 33, and rows 2, 5, 7, 13 and 22 with `--async_checkpoint=on`: whatever ends the trainer or its writer process."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from harness import PACE, FaultRun

pytestmark = pytest.mark.fault


@pytest.fixture
def run(run) -> FaultRun:
    run.flags = (*run.flags, "--async_checkpoint=on")
    return run


def writers(run: FaultRun) -> list[int]:
    """Return the writer processes of the run that live: their environment is that of its start."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_writer = b"gpt2lab.checkpoint.writer" in (folder / "cmdline").read_bytes()
            is_ours = f"RUN_OF={run.folder}".encode() in (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if is_writer and is_ours and state != "Z":
            found.append(int(folder.name))
    return found


def start(run: FaultRun, *more: str, fault: str) -> subprocess.Popen[str]:
    return run.start(*more, FAULT=f"{PACE};{fault}", RUN_OF=str(run.folder))


@pytest.mark.parametrize(
    ("stage", "ends", "newest"),
    [("optim.safetensors", "the trainer", 5), ("after_rename", "both", 10)],
)
def test_row_02_killed_at_a_stage_of_an_asynchronous_save(stage, ends, newest, run, reference):
    """The writer never commits after the trainer's death, and never outlives it."""
    process = start(run, fault=f"checkpoint.{stage}:sleep60@10")
    save = "step_00000010" if newest == 10 else ".tmp-00000010-*"
    run.wait_until(process, lambda: bool(list(run.path.glob(save))), "the save of step 10")
    assert len(writers(run)) == 1
    if ends == "both":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    assert run.resume() == 0, run.errors()  # it locks the folder: no writer has it
    assert writers(run) == []
    assert [event["from_step"] for event in run.events("resume")] == [newest]
    assert [e["step"] for e in run.events("checkpoint")] == [5, 10, 15, 20, 24, 25, 30, 35, 40]
    assert not list(run.path.glob(".tmp-*"))
    run.assert_equals(reference(1))


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("kill9", "the writer process ended (killed by signal 9)"),
        ("enospc", "No space left on device"),
    ],
)
def test_row_33_the_writer_dies_or_its_disk_is_full(action, said, run, reference):
    """That save is missing, with a warning; the next one has a new writer, or the same."""
    process = start(run, fault=f"checkpoint.optim.safetensors:{action}@10")
    assert run.end_of(process) == 0, run.errors()
    [warning] = [e["message"] for e in run.events("warning") if "not saved" in e["message"]]
    assert warning.startswith("checkpoint of step 10 not saved: ")
    assert said in warning
    assert [e["step"] for e in run.events("checkpoint")] == [5, 15, 20, 24, 25, 30, 35, 40]
    assert writers(run) == []
    assert not list(run.path.glob(".tmp-*"))
    run.assert_equals(reference(1))


def test_row_07_ctrl_c_while_a_save_is_in_flight(run, reference):
    """It reaches both processes. The save ends, then the step of the stop is saved; nothing is lost."""
    process = start(run, "--checkpoint_freq=10", fault="checkpoint.before_rename:sleep2@10")
    run.wait_until(process, lambda: bool(list(run.path.glob(".tmp-00000010-*"))), "a save")
    run.wait_for(process, "step", 12)
    os.killpg(process.pid, signal.SIGINT)
    assert run.end_of(process) == 0, run.errors()
    [stop] = run.events("stop")
    assert stop["step"] == max(run.steps())
    steps = [e["step"] for e in run.events("checkpoint")]
    assert steps == sorted({10, *steps, stop["step"]})
    assert (run.status()["state"], run.status()["exit_code"]) == ("stopped", 0)
    assert writers(run) == []
    run.resumes_as(reference(1))


def test_row_22_two_ranks_gather_their_shards_for_one_writer(run, reference):
    """zero1's moments are gathered into the buffer; between CPUs its bits are those of ddp."""
    process = run.start("--parallel=zero1", world=2, FAULT=PACE, RUN_OF=str(run.folder))
    run.wait_for(process, "checkpoint", 5)
    assert len(writers(run)) == 1
    assert run.end_of(process) == 0, run.errors()
    assert writers(run) == []
    run.assert_equals(reference(2))


def test_row_11_a_rank_dies_while_a_save_is_in_flight(run, reference):
    """Rank 0 first ends the save of step 5, then saves the last complete step."""
    fault = "step:sleep0.1@*;step:kill9@8,rank=1;checkpoint.before_rename:sleep1.5@5"
    process = run.start(world=2, FAULT=fault, RUN_OF=str(run.folder))
    assert run.end_of(process) != 0
    run.assert_no_process_left(process)
    assert run.saved() == [5, 7], run.errors()
    assert [e["step"] for e in run.events("checkpoint")] == [5, 7]
    run.resumes_as(reference(2), world=2)
