"""gpt2lab status, and names of runs: read from the files of a run while it trains or after it died."""

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launch
from gpt2lab.checkpoint.catalog import list_checkpoints, newest_run
from gpt2lab.commands.checkpoints import List
from gpt2lab.runs import history, overview
from gpt2lab.runs.folder import RunFolder
from launch import append, call
from tiny import edit_json


def test_status_of_a_complete_run(run_dir):
    status = overview.read_run(run_dir)
    assert (status.state, status.exit_code, status.problem) == ("completed", 0, None)
    assert (status.step, status.last_step, status.checkpoint_step) == (12, 12, 12)
    assert status.loss == launch.steps(run_dir)[12]["loss"]
    assert status.val_loss == launch.events(run_dir, "eval")[-1]["val_loss"]
    assert time.time() - status.checkpoint_seconds >= list_checkpoints(run_dir)[0][-1].created
    width = max(map(len, (table := overview.status_table([status])).splitlines()))
    assert overview.status_table([status], width=width) == table
    words = ("status", "--checkpoint_dir", run_dir.parent)
    assert "completed  12/12" in launch.worked(call(*words)).stdout
    # A failed run shows its exit code, and one with a damaged log its problem.
    edit_json(run_dir / "status.json", state="failed", exit_code=76)
    (run_dir / "metrics.jsonl").write_text((run_dir / "metrics.jsonl").read_text() + "not json\n")
    assert "failed (76)" in (said := call(*words)[1])
    assert "not JSON" in said.splitlines()[-1]


def test_a_run_whose_process_is_gone_is_not_called_running(run_dir):
    edit_json(run_dir / "status.json", state="running", exit_code=None)
    assert overview.read_run(run_dir).state == "killed"
    with contextlib.closing(RunFolder(run_dir)):
        assert overview.read_run(run_dir).state == "running"
    assert overview.read_run(run_dir).state == "killed"
    # Who only looks whether the lock is held takes a share of it, and keeps no run from starting.
    with open(run_dir / "run.lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        RunFolder(run_dir).close()


def test_the_time_left_of_a_running_run_counts_down(run_dir, monkeypatch):
    edit_json(run_dir / "status.json", state="running")
    last = launch.events(run_dir, "step")[-1] | {"remaining_seconds": 100.0, "step": 12}
    monkeypatch.setattr(time, "time", lambda: last["time"] + 30)
    append(run_dir, **last)
    with contextlib.closing(RunFolder(run_dir)):
        assert overview.read_run(run_dir).remaining_seconds == 70
        begin = launch.events(run_dir, "begin")[-1] | {"attempt": last["attempt"] + 1, "step": 12}
        append(run_dir, **begin)
        assert overview.read_run(run_dir).remaining_seconds is None, "a resume has no pace yet"


def test_what_this_user_may_not_read_hides_no_run(run_dir, monkeypatch):
    """As lost+found, where runs have a disk of their own, and another user's run."""
    runs = run_dir.parent
    shutil.copytree(run_dir, runs / "lost+found")
    (runs / "lost+found" / "metrics.jsonl").unlink()
    real, real_access = os.stat, os.access

    def stat(path: str | Path, **options: Any) -> os.stat_result:
        if "lost+found/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(
        os, "access", lambda path, mode: "lost+found" not in str(path) and real_access(path, mode)
    )
    assert [run.run_name for run in overview.read_runs(runs)] == ["r"]
    assert (newest_run(runs), List(checkpoint_dir=runs).execute()) == (run_dir, 0)
    monkeypatch.undo()
    denied = PermissionError(errno.EACCES, "Permission denied", "metrics.jsonl")
    monkeypatch.setattr(history, "open", Mock(side_effect=denied), raising=False)
    assert "Permission denied" in str(overview.read_run(run_dir).problem)


def test_status_as_json_of_no_runs_and_of_a_wrong_folder(tmp_path):
    assert call("status", "--json", "--checkpoint_dir", tmp_path)[1] == '{"runs": []}\n'
    assert "no runs in" in call("status", "--checkpoint_dir", tmp_path)[1]
    for words in (["--checkpoint_dir", "nowhere"], ["--watch", "0"], ["--watch", "1", "--json"]):
        launch.rejected(call("status", *words))


def test_watch_shows_again_until_it_is_interrupted(run_dir):
    command = [*launch.words_of("status"), "--watch=0.1", f"--checkpoint_dir={run_dir.parent}"]
    # What a shell starts in the background, as these tests may be, ignores Ctrl+C, and so do its children.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
        shown = [process.stdout.readline() for _ in range(9)]
        log, damaged = run_dir / "metrics.jsonl", run_dir / "damaged"
        damaged.write_bytes(b"x" + log.read_bytes()[1:])
        os.utime(damaged, ns=(0, log.stat().st_mtime_ns))
        os.replace(damaged, log)
        shown += [process.stdout.readline() for _ in range(9)]
        os.utime(log)
        assert any("not JSON" in process.stdout.readline() for _ in range(20))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 0
    assert sum("completed" in line for line in shown) >= 2
    assert "not JSON" not in "".join(shown), "the log of a complete run was read again"
