"""The comparison of two recordings finds a planted difference."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import record_runs

RECORDING: dict[str, Any] = {
    "plain": {
        "starts": [{"exit_code": 0, "printed": None}],
        "events": [{"event": "step", "step": n, "loss": 5.5 - n / 8} for n in (1, 2, 3)],
        "config": {"max_lr": 0.0006, "min_lr": None},
        "files": {"config.json": "~", "step_00000003/model.safetensors": "0a1b"},
    }
}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda run: run["events"][1].update(loss=5.250000001), "/plain/events/1/loss"),
        (lambda run: run["events"].pop(), "/plain/events"),
        (lambda run: run["config"].pop("min_lr"), "/plain/config/min_lr"),
        (lambda run: run["files"].update(other="~"), "/plain/files/other"),
    ],
)
def test_a_planted_difference_is_one_line(change, place, tmp_path, capsys):
    changed = copy.deepcopy(RECORDING)
    change(changed["plain"])
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    for file, recording in zip(files, (RECORDING, changed), strict=True):
        Path(file).write_text(json.dumps(recording))
    assert record_runs.main(["--compare", *files]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{place}: ")
    assert summary == "1 runs, 1 differences"


def test_what_depends_on_the_clock_and_the_folders_is_not_recorded() -> None:
    event = {"time": 1.5, "step_seconds": 2.0, "hang_seconds": 600.0, "path": "/a/b/runs"}
    known = {"time": "~", "step_seconds": "~", "hang_seconds": 600.0, "path": "FOLDER/runs"}
    assert record_runs.normalize([event], {"/a/b": "FOLDER"}) == [known]
