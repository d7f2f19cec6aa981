"""A run that is interrupted at its last step: what is due after it is done by the resume, each thing once."""

import json
import shutil
from pathlib import Path

import pytest

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.errors import SaveError
from last_step import LAST, after_last_step, assert_complete, flags_of, straight_run
from tiny import parse, pretrain

BEFORE = [f"measure.{name}" for name in ("eval", "hellaswag", "sample", "average")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return straight_run(tmp_path_factory.mktemp("last"))


@pytest.mark.usefixtures("counts_signals")
@pytest.mark.parametrize("place", BEFORE)
def test_after_a_stop_at_its_last_step_a_run_measures_the_rest(folder, place, monkeypatch, capsys):
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


@pytest.mark.parametrize("place", ["step.report", "measure.eval", "checkpoint.after_label"])
def test_an_error_at_the_last_step_leaves_the_rest_to_the_resume(folder, place, monkeypatch):
    """In the step's report, nothing has noted yet what is due after it."""
    name = f"raise_{place}"
    flags = flags_of(folder, name)
    monkeypatch.setenv("FAULT", f"{place}:raise@{LAST}")
    monkeypatch.setattr(
        "gpt2lab.training.steps.report_health",
        lambda state, *_, **__: faultpoint("step.report", state.step),
    )
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


def test_a_full_disk_at_the_label_of_the_last_step_is_made_good(folder, monkeypatch):
    flags = flags_of(folder, "label")
    monkeypatch.setenv("FAULT", f"checkpoint.before_label:enospc@{LAST}")
    with pytest.raises(SaveError, match=r"label best of step 4 not set.*free space.*resume"):
        pretrain(parse(flags))
    assert after_last_step(folder / "runs" / "label")["done"] == []
    monkeypatch.delenv("FAULT")
    pretrain(parse([*flags, "--resume=latest"]))
    assert_complete(folder, "label")


@pytest.mark.usefixtures("counts_signals")
def test_an_extended_run_takes_its_best_loss_from_the_record(folder, monkeypatch):
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


def test_a_checkpoint_alone_is_brought_to_its_end_once(folder, tmp_path):
    """Copied without its run's other files, it says itself that nothing is left to measure."""
    alone = tmp_path / "runs" / "straight"
    shutil.copytree(folder / "runs" / "straight" / folder_name(LAST), alone / folder_name(LAST))
    more = (f"--checkpoint_dir={tmp_path / 'runs'}", "--resume=latest")
    pretrain(parse([*flags_of(folder, "straight"), *more]))
    events = after_last_step(alone)
    counts = {kind: len(found) for kind, found in events.items()}
    assert counts == {"eval": 0, "hellaswag": 0, "sample": 0, "checkpoint": 1, "done": 1}
    assert json.loads((alone / "status.json").read_text())["state"] == "completed"
