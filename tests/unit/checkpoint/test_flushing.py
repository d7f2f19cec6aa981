"""Rows 46 and 47: what is on the disk before something else, and what a call that fails leaves.

tests/faults/power_cut.py and syscall_sweep.py found what each of these tests holds.
"""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpt2lab.checkpoint import catalog, manifest, store
from gpt2lab.errors import CheckpointError
from gpt2lab.runs import history
from gpt2lab.runs.folder import RunFolder
from plain_log import read_events
from whole_run import Run

RUN = ("--checkpoint_freq=2", "--eval_freq=0")


def test_a_new_run_has_its_name_on_disk_before_its_first_checkpoint(tiny_data, tmp_path, listen):
    run, calls = Run(tiny_data, tmp_path / "new" / "runs"), listen()
    run.train("--max_steps=1")
    commit = calls.index(("rename", run.path / "step_00000001"))
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "runs"):
        assert ("fsync", folder) in calls[:commit]


def test_a_retired_checkpoint_has_lost_its_name_on_the_disk_before_its_files_go(run, listen):
    calls = listen()
    run.train("--max_steps=6", "--keep_checkpoints=1")
    retired = [place for place, (name, path) in enumerate(calls) if ".del-" in path.name]
    assert len(retired) == 4, "two checkpoints, each renamed and deleted"
    for renamed, deleted in zip(retired[::2], retired[1::2], strict=True):
        assert [name for name, _ in calls[renamed : deleted + 1]] == ["rename", "fsync", "rmtree"]
        assert calls[renamed + 1][1] == run.path


def test_newer_checkpoints_are_set_aside_on_the_disk_before_the_log_goes_back(run, listen):
    run.train("--max_steps=8", "--stop_after_steps=6")
    begun: dict[str, int] = {}

    def hear(name: str, path: Path) -> None:
        if name == "fsync" and path.name.startswith(catalog.SUPERSEDED):
            begun["aside"] = len(run.events("begin"))
        elif name == "fsync" and path == run.path and "aside" in begun:
            begun.setdefault("run", len(run.events("begin")))

    catalog.set_label(run.path, "mine", 4)
    listen(hear)
    run.train("--resume=2")
    assert begun == {"aside": 1, "run": 1}, "without the line of the second start"
    assert "mine" not in run.labels(), "of one that was set aside, and not the last"


def test_the_end_of_the_log_is_on_the_disk_before_the_status_says_completed(run, listen):
    flushed: list[int] = []
    at_end: list[tuple[int, int]] = []
    metrics = run.path / "metrics.jsonl"

    def hear(name: str, path: Path) -> None:
        if name == "fsync" and path == metrics:
            flushed.append(metrics.stat().st_size)
        elif name == "replace" and path.name == "status.json":
            at_end.append((flushed[-1] if flushed else 0, metrics.stat().st_size))

    listen(hear)
    run.train("--max_steps=2")
    assert at_end[-1][0] == at_end[-1][1] == metrics.stat().st_size
    assert run.events("done")


def test_a_checkpoint_whose_name_cannot_be_flushed_is_told_and_retires_nothing(run, listen, capsys):
    def hear(name: str, path: Path) -> None:
        if calls[-2:] == [("rename", run.path / "step_00000004"), ("fsync", run.path)]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    calls = listen(hear)
    run.train("--max_steps=8", "--stop_after_steps=4", "--keep_checkpoints=1")
    assert "step 4: [Errno 5] Input/output error" in capsys.readouterr().out
    assert list(run.checkpoints()) == [2, 4]
    run.train("--resume=latest")
    assert list(run.checkpoints()) == [8], "the next one whose name is there retires both"


def test_a_label_that_cannot_be_read_keeps_its_checkpoint(run, monkeypatch):
    """Torch maps the file of weights itself, and says in a RuntimeError that it could not."""
    run.train("--max_steps=6")
    catalog.set_label(run.path, "best", 2)
    fail = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "read_regular", fail)
        with pytest.raises(OSError, match="Input/output error"):
            catalog.retain(run.path, keep=1, keep_emergency=1)
    assert list(run.checkpoints()) == [2, 4, 6]
    assert catalog.retain(run.path, keep=1, keep_emergency=1) == [4]
    fail = Mock(side_effect=RuntimeError("unable to open file <x>: Input/output error (5)"))
    monkeypatch.setattr(store.safetensors.torch, "load_file", fail)
    with pytest.raises(CheckpointError, match="unable to open file"):
        store._read(run.path / manifest.folder_name(2) / store.MODEL)


def test_new_versions_of_small_files_that_were_left_are_removed_by_the_next_start(tmp_path):
    labels = tmp_path / "run" / "labels"
    labels.mkdir(parents=True)
    left = [labels / ".best.01ab23cd", tmp_path / "run" / ".status.json.89ab4567"]
    others = [labels / ".mine", tmp_path / "run" / ".notes.txt", labels / "best.01ab23cd"]
    for path in (*left, *others):
        path.write_text("{")
    RunFolder(tmp_path / "run").close()
    assert [path.exists() for path in (*left, *others)] == [False, False, True, True, True]


@pytest.mark.parametrize("before", [b"\0" * 148, b'{"event": "begin", "ti' + b"\0" * 126])
def test_a_line_after_a_hole_that_a_power_cut_left_is_read(before, tmp_path):
    """The disk may have the second of two lines that were not flushed, and zeros in place of the first."""
    line = {"event": "warning", "time": 1.5, "attempt": 1, "step": 0, "message": "m"}
    (tmp_path / "metrics.jsonl").write_bytes(before + json.dumps(line).encode() + b"\n")
    log = history.read_log(tmp_path)
    assert log.events == read_events(tmp_path) == [line]
    assert log.problem is None
