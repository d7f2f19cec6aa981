"""A process is killed, or one of two ranks is interrupted, at the last step of a run: the resume completes it."""

import json
import subprocess
from pathlib import Path

import pytest

import launch
from last_step import LAST, after_last_step, assert_complete, flags_of, straight_run

pytestmark = pytest.mark.fault
PLACES = [
    *("checkpoint.after_rename", "checkpoint.before_label", "checkpoint.after_label"),
    *("end.before_done", "end.after_done", "end.before_status"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return straight_run(tmp_path_factory.mktemp("last"))


def start(command: list[str], code: int | None = None, **fault: str) -> int:
    """Start a run to its end and return its exit code."""
    done = subprocess.run(command, env=launch.environment(**fault), capture_output=True, text=True)
    assert code in (None, done.returncode), done.stderr
    return done.returncode


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_the_last_step_loses_nothing(folder, place):
    name = f"kill_{place}"
    command = launch.command_for(launch.TRAIN, flags_of(folder, name), world=1)
    start(command, -9, FAULT=f"{place}:kill9@{LAST}")
    start([*command, "--resume=auto"], 0)
    assert_complete(folder, name)


@pytest.mark.parametrize("fault", ["measure.eval:term", "measure.sample:raise"])
def test_two_ranks_go_on_after_an_interruption_of_one(folder, fault):
    rank = 0 if "sample" in fault else 1
    name = f"two_{fault}".replace(":", "_")
    command = launch.command_for(launch.TRAIN, flags_of(folder, name), world=2)
    code = start(command, FAULT=f"{fault}@{LAST},rank={rank}")
    assert (code == 0) == ("term" in fault)
    state = json.loads((folder / "runs" / name / "status.json").read_text())["state"]
    assert state == ("stopped" if "term" in fault else "failed")
    start([*command, "--resume=auto"], 0)
    assert json.loads((folder / "runs" / name / "status.json").read_text())["state"] == "completed"
    events = after_last_step(folder / "runs" / name)
    assert {kind: len(found) for kind, found in events.items()} == dict.fromkeys(events, 1)
