"""What a run records of its last step, to compare one that was interrupted there with one that was not."""

import json
from pathlib import Path
from typing import Any

import launch
import tiny
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import folder_name
from tiny import parse, pretrain, write_inputs

LAST = 4
# Of an evaluation and a sample, all but what a clock says.
TIMES = {"time", "attempt", "seconds", "checkpoint"}


def flags_of(folder: Path, name: str, *more: str) -> list[str]:
    """Return the command line of a run that also measures the mean of its last weights."""
    return tiny.flags_of(folder, name, "--average_tail=0.5", *more)


def straight_run(folder: Path) -> Path:
    """Write data, items, and a run `straight` that nothing interrupted, which improves to its end."""
    write_inputs(folder, items=6)
    pretrain(parse(flags_of(folder, "straight")))
    assert catalog.read_labels(folder / "runs" / "straight")["best"] == folder_name(LAST)
    return folder


def after_last_step(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what a run recorded of its last step, without times."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("eval", "hellaswag", "sample", "checkpoint", "done"):
        events = [event for event in launch.events(run, kind) if event["step"] == LAST]
        drop = TIMES | ({"path"} if kind == "checkpoint" else {"path", "bytes"})
        found[kind] = [{k: v for k, v in event.items() if k not in drop} for event in events]
    return found


def assert_complete(folder: Path, name: str) -> None:
    """Compare a run that was interrupted and resumed with the straight one."""
    run, straight = folder / "runs" / name, folder / "runs" / "straight"
    ours, theirs = after_last_step(run), after_last_step(straight)
    (saved,), (expected,) = ours.pop("checkpoint"), theirs.pop("checkpoint")
    assert saved["kind"] == expected["kind"] == "final"
    assert ours == theirs
    assert {kind: len(events) for kind, events in ours.items()} == dict.fromkeys(ours, 1)
    assert catalog.read_labels(run)["best"] == folder_name(LAST)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("completed", LAST, 0)
    assert json.loads((run / "estimate.json").read_text())["actual"]["steps"] == LAST
    for name in ("model.safetensors", "optim.safetensors"):
        files = [path / folder_name(LAST) / name for path in (run, straight)]
        assert files[0].read_bytes() == files[1].read_bytes()
