"""A process is killed, or one of two ranks is interrupted, at the last step of a run: the resume completes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import launch
from last_step import LAST, after_last_step, assert_complete, straight_run
from tiny import flags_of

pytestmark = pytest.mark.fault
PLACES = [
    *("checkpoint.after_rename", "checkpoint.before_label", "checkpoint.after_label"),
    *("end.before_done", "end.after_done", "end.before_status"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return straight_run(tmp_path_factory.mktemp("last"))


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_the_last_step_loses_nothing(folder, place):
    name = f"kill_{place}"
    command = launch.command_for(launch.TRAIN, flags_of(folder, name), world=1)
    killed = launch.environment(FAULT=f"{place}:kill9@{LAST}")
    assert subprocess.run(command, env=killed, capture_output=True).returncode == -9
    done = subprocess.run(
        [*command, "--resume=auto"], env=launch.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert_complete(folder, name)


@pytest.mark.parametrize("fault", ["measure.eval:term", "measure.sample:raise"])
def test_two_ranks_go_on_after_an_interruption_of_one(folder, fault):
    rank = 0 if "sample" in fault else 1
    name = f"two_{fault}".replace(":", "_")
    command = launch.command_for(launch.TRAIN, flags_of(folder, name), world=2)
    broken = launch.environment(FAULT=f"{fault}@{LAST},rank={rank}")
    first = subprocess.run(command, env=broken, capture_output=True, text=True)
    assert (first.returncode == 0) == ("term" in fault), first.stderr
    state = json.loads((folder / "runs" / name / "status.json").read_text())["state"]
    assert state == ("stopped" if "term" in fault else "failed")
    done = subprocess.run(
        [*command, "--resume=auto"], env=launch.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "runs" / name / "status.json").read_text())["state"] == "completed"
    events = after_last_step(folder / "runs" / name)
    assert {kind: len(found) for kind, found in events.items()} == dict.fromkeys(events, 1)
