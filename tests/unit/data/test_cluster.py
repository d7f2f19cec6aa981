"""Preparation on a Ray cluster: two nodes on this machine, one of whose workers is killed."""

import os
import signal
import threading
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

import launch
from corpora import TEXTS, snapshot, write_jsonl
from ecosystem import works_with

MANY = [f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(3000)]
FLAGS = ("--shard_tokens=4k", "--val_tokens=3k", "--group_bytes=40k")

pytestmark = pytest.mark.slow


def _kill_worker_of(staging: Path, killed: list[int]) -> None:
    """Kill the processes that are working on groups while group 1 is one of them, once."""
    while not list(staging.glob("groups/.group_00001.*")):
        time.sleep(0.01)
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or []).startswith("ray::_run"):
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)


def test_a_cluster_whose_workers_die_writes_the_bytes_of_one_machine(start_cluster, tmp_path):
    works_with("ray", version("ray"), "data prepared on a cluster whose workers die")
    source = write_jsonl(tmp_path / "corpus.jsonl", MANY)
    launch.worked(launch.call("prepare_data.py", source, f"--out={tmp_path / 'one'}", *FLAGS))
    assert len(snapshot(tmp_path / "one")) > 8
    address, _ = start_cluster(fault="data.before_group:sleep3@1")
    killed: list[int] = []
    staging = tmp_path / "out.partial"
    threading.Thread(target=_kill_worker_of, args=(staging, killed), daemon=True).start()
    words = (source, f"--out={tmp_path / 'out'}", f"--ray={address}", *FLAGS)
    said = launch.worked(launch.script("prepare_data.py", *words)).stdout
    assert "3,000 (" in said
    assert killed
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "one")


def test_an_address_without_a_cluster_is_one_line(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", MANY)
    words = (source, f"--out={tmp_path / 'out'}", "--ray=127.0.0.1:1")
    done = launch.call("prepare_data.py", *words)
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]  # after the bar of progress
    assert error.startswith("error: --ray 127.0.0.1:1: no Ray cluster at this address (")
    assert not (tmp_path / "out").exists()
