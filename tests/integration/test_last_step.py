"""A run that is interrupted at its last step: what is due after it is done by the resume, each thing once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import launch
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.config.command_line import parse
from gpt2lab.errors import SaveError
from gpt2lab.training.pretrain import pretrain
from tiny import flags_of, write_items, write_shards

LAST = 4
BEFORE = [f"measure.{name}" for name in ("eval", "hellaswag", "sample")]
AFTER = ["checkpoint.before_label", "checkpoint.after_label"]
AFTER += ["end.before_done", "end.after_done", "end.before_status"]
# Of an evaluation and a sample, all but what a clock says.
TIMES = {"time", "attempt", "seconds", "checkpoint"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, items, and a run `straight` that nothing interrupted, which improves to its end."""
    folder = tmp_path_factory.mktemp("last")
    write_shards(folder / "data", train=(2000,), val=(650,))
    write_items(folder / "items.jsonl", 6)
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


@pytest.mark.parametrize("place", BEFORE)
def test_a_stop_at_the_last_step_is_a_stop_and_the_resume_measures_the_rest(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"term_{place}"
    flags = flags_of(folder, name)
    monkeypatch.setenv("FAULT", f"{place}:term@{LAST}")
    pretrain(parse(flags))
    status = json.loads((folder / "runs" / name / "status.json").read_text())
    assert (status["state"], status["reason"], status["exit_code"]) == ("stopped", "SIGTERM", 0)
    assert after_last_step(folder / "runs" / name)["done"] == []
    monkeypatch.delenv("FAULT")
    pretrain(parse([*flags, "--resume=latest"]))
    assert_complete(folder, name)
    capsys.readouterr()
    pretrain(parse([*flags, "--resume=latest"]))
    assert "already complete" in capsys.readouterr().out
    assert_complete(folder, name)


@pytest.mark.parametrize("place", ["measure.eval", "checkpoint.after_label"])
def test_an_error_at_the_last_step_fails_the_start_and_the_resume_completes_the_run(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"raise_{place}"
    flags = flags_of(folder, name)
    monkeypatch.setenv("FAULT", f"{place}:raise@{LAST}")
    with pytest.raises(RuntimeError, match=f"fault point {place}"):
        pretrain(parse(flags))
    status = json.loads((folder / "runs" / name / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    monkeypatch.delenv("FAULT")
    pretrain(parse([*flags, "--resume=latest"]))
    events = after_last_step(folder / "runs" / name)
    assert [event["kind"] for event in events["checkpoint"]] in (["final"], ["emergency"])
    if events["checkpoint"][0]["kind"] == "final":
        assert_complete(folder, name)
    else:  # saved on the way out, before the last step's measurements
        assert [len(events[kind]) for kind in ("eval", "hellaswag", "sample", "done")] == [1] * 4


@pytest.mark.fault
@pytest.mark.parametrize("place", ["checkpoint.after_rename", *AFTER])
def test_a_kill_at_the_last_step_loses_nothing(folder: Path, place: str) -> None:
    name = f"kill_{place}"
    command = launch.command_for(launch.TRAIN, flags_of(folder, name), world=1)
    killed = launch.environment(FAULT=f"{place}:kill9@{LAST}")
    assert subprocess.run(command, env=killed, capture_output=True).returncode == -9
    done = subprocess.run(
        [*command, "--resume=auto"], env=launch.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert_complete(folder, name)


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["measure.eval:term", "measure.sample:raise"])
def test_two_ranks_go_on_after_an_interruption_of_one(folder: Path, fault: str) -> None:
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


def test_a_full_disk_at_the_label_of_the_last_step_is_made_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = flags_of(folder, "label")
    monkeypatch.setenv("FAULT", f"checkpoint.before_label:enospc@{LAST}")
    with pytest.raises(SaveError, match=r"label best of step 4 not set.*free space and resume"):
        pretrain(parse(flags))
    assert after_last_step(folder / "runs" / "label")["done"] == []
    monkeypatch.delenv("FAULT")
    pretrain(parse([*flags, "--resume=latest"]))
    assert_complete(folder, "label")


def test_events_that_the_disk_does_not_take_are_an_error_and_the_resume_writes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, problem = flags_of(folder, "full"), "metrics.jsonl: No space left on device"
    monkeypatch.setattr(
        "gpt2lab.runs.logger.MetricsLogger.catch_up",
        lambda self: problem if any(b'"done"' in self._held_back for _ in [0]) else _write(self),
    )
    with pytest.raises(SaveError, match=problem):
        pretrain(parse(flags))
    monkeypatch.undo()
    pretrain(parse([*flags, "--resume=latest"]))
    assert_complete(folder, "full")


def _write(logger: Any) -> None:
    os.write(logger._metrics.fileno(), logger._held_back)
    logger._held_back.clear()


def test_an_extended_run_takes_its_best_loss_from_the_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint was saved before its evaluation, which the resume made: the extension knows its result."""
    flags = flags_of(folder, "longer")
    monkeypatch.setenv("FAULT", f"measure.eval:term@{LAST}")
    pretrain(parse(flags))
    monkeypatch.delenv("FAULT")
    pretrain(parse([*flags, "--resume=latest"]))
    known = after_last_step(folder / "runs" / "longer")["eval"]
    more = ["--resume=latest", "--max_steps=6", "--allow_change=max_steps", "--max_lr=10"]
    more += ["--min_lr=10", "--allow_change=max_steps,max_lr,min_lr"]
    pretrain(parse([*[flag for flag in flags if not flag.startswith("--max_")], *more]))
    assert after_last_step(folder / "runs" / "longer")["eval"] == known
    state = folder / "runs" / "longer" / folder_name(6) / "state.json"
    assert json.loads(state.read_text())["state"]["best_val_loss"] == known[0]["val_loss"]


def test_a_checkpoint_alone_is_brought_to_its_end_once(folder: Path, tmp_path: Path) -> None:
    """Copied without its run's other files, it says itself that nothing is left to measure."""
    alone = tmp_path / "runs" / "straight"
    shutil.copytree(folder / "runs" / "straight" / folder_name(LAST), alone / folder_name(LAST))
    flags = [flag for flag in flags_of(folder, "straight") if "checkpoint_dir" not in flag]
    flags += [f"--checkpoint_dir={tmp_path / 'runs'}", "--resume=latest"]
    pretrain(parse(flags))
    events = after_last_step(alone)
    assert {kind: len(found) for kind, found in events.items()} == {
        **dict.fromkeys(("eval", "hellaswag", "sample"), 0),
        **dict.fromkeys(("checkpoint", "done"), 1),
    }
    assert json.loads((alone / "status.json").read_text())["state"] == "completed"
