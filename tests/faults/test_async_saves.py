"""Row 33, and rows 2, 7, 11 and 22 with `--async_checkpoint=on`: whatever ends the trainer while a thread writes."""

import os
import signal

import pytest
from harness import PACE, FaultRun

pytestmark = pytest.mark.fault


@pytest.fixture
def run(run) -> FaultRun:
    run.flags = (*run.flags, "--async_checkpoint=on")
    return run


@pytest.mark.parametrize(("stage", "newest"), [("optim.safetensors", 5), ("after_rename", 10)])
def test_row_02_killed_at_a_stage_of_an_asynchronous_save(stage, newest, run, reference):
    process = run.start(FAULT=f"{PACE};checkpoint.{stage}:sleep60@10")
    save = "step_00000010" if newest == 10 else ".tmp-00000010-*"
    run.wait_until(process, lambda: bool(list(run.path.glob(save))), "the save of step 10")
    process.kill()
    process.wait()
    assert run.resume() == 0, run.errors()
    assert [event["from_step"] for event in run.events("resume")] == [newest]
    assert [e["step"] for e in run.events("checkpoint")] == [5, 10, 15, 20, 24, 25, 30, 35, 40]
    assert not list(run.path.glob(".tmp-*"))
    run.assert_equals(reference(1))


def test_row_33_the_disk_is_full_in_an_asynchronous_save(run, reference):
    """That save is missing, with a warning."""
    assert run.train(FAULT="checkpoint.optim.safetensors:enospc@10") == 0, run.errors()
    [warning] = [e["message"] for e in run.events("warning") if "not saved" in e["message"]]
    assert warning.startswith("checkpoint of step 10 not saved: ")
    assert "No space left on device" in warning
    assert [e["step"] for e in run.events("checkpoint")] == [5, 15, 20, 24, 25, 30, 35, 40]
    assert not list(run.path.glob(".tmp-*"))
    run.assert_equals(reference(1))


def test_row_07_ctrl_c_while_a_save_is_in_flight(run, reference):
    """The save ends, then the step of the stop is saved; nothing is lost."""
    fault = f"{PACE};checkpoint.before_rename:sleep2@10"
    process = run.start("--checkpoint_freq=10", FAULT=fault)
    run.wait_until(process, lambda: bool(list(run.path.glob(".tmp-00000010-*"))), "a save")
    run.wait_for(process, "step", 12)
    os.killpg(process.pid, signal.SIGINT)
    assert run.end_of(process) == 0, run.errors()
    [stop] = run.events("stop")
    assert stop["step"] == max(run.steps())
    steps = [e["step"] for e in run.events("checkpoint")]
    assert steps == sorted({10, *steps, stop["step"]})
    assert (run.status()["state"], run.status()["exit_code"]) == ("stopped", 0)
    run.resumes_as(reference(1))


def test_row_22_two_ranks_gather_their_shards_for_one_thread(run, reference):
    """zero1's moments are gathered into the buffer; between CPUs its bits are those of ddp."""
    assert run.train("--parallel=zero1", world=2, FAULT=PACE) == 0, run.errors()
    run.assert_equals(reference(2))


def test_row_11_a_rank_dies_while_a_save_is_in_flight(run, reference):
    """Rank 0 first ends the save of step 5, then saves the last complete step."""
    fault = "step:sleep0.1@*;step:kill9@8,rank=1;checkpoint.before_rename:sleep1.5@5"
    assert run.finish(world=2, FAULT=fault) != 0
    assert run.saved() == [e["step"] for e in run.events("checkpoint")] == [5, 7], run.errors()
    run.resumes_as(reference(2), world=2)
