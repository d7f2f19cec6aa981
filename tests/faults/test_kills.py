"""Rows 1 to 3: kill -9 at random instants, and at every stage of retiring. More random ones: soak.py."""

import json
import os
import random
import signal

import pytest
from harness import PACE

import launch

pytestmark = pytest.mark.fault

SEED = int(os.environ.get("SEED", "1337"))


def test_row_01_random_kills_of_two_processes(run, reference):
    """The launcher and both workers at once, as a machine that loses power."""
    dice = random.Random(SEED)
    for attempt, step in ((1, dice.randrange(6, 14)), (2, dice.randrange(18, 28))):
        process = run.start("--resume=auto", world=2, FAULT=PACE)
        run.wait_for(process, "step", step, attempt)
        for pid in (process.pid, *run.workers(process).values()):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        run.assert_no_process_left(process)
        assert run.saved()[-1] >= step - 5
    run.resumes_as(reference(2), "--resume=auto", world=2)


@pytest.mark.parametrize("point", ["before_delete", "after_rename"])
def test_rows_02_and_03_killed_while_a_checkpoint_is_retired(point, run, reference):
    """What is listed afterwards is complete, and is the newest that was committed."""
    run.flags = (*run.flags, "--keep_checkpoints=1")
    assert run.finish(FAULT=f"retain.{point}:kill9@15") != 0
    words = ["--list_checkpoints", "--verify", "--json", f"--checkpoint_dir={run.folder}"]
    listed = launch.train_in_forks(words)
    assert listed.returncode == 0, listed.stdout
    steps = [row["step"] for row in json.loads(listed.stdout)["runs"][0]["checkpoints"]]
    assert steps[-1] == 15
    run.resumes_as(reference(1))
    assert [event["from_step"] for event in run.events("resume")] == [15]
    assert not [*run.path.glob(".tmp-*"), *run.path.glob(".del-*")]
