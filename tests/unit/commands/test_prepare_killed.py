"""The program that prepares data, killed and started again: the bytes are those of one that nobody disturbed."""

import contextlib
import json
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from corpora import MANY, assert_divided, run_prepare, snapshot, write_jsonl
from gpt2lab.data.shards import open_data
from launch import HANG_SECONDS, call, environment, slow, words_of, worked


def start(source: Path, out: Path, *flags: str, fault: str = "") -> subprocess.Popen[str]:
    """Start the preparation as a user does."""
    command = [*words_of("prepare_data.py"), str(source), f"--out={out}", *flags]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(FAULT=fault), **pipes)


def exit_code(process: subprocess.Popen[str]) -> int:
    """Return it once the process has ended, and close its pipes."""
    process.communicate(timeout=HANG_SECONDS)
    return process.returncode


@pytest.mark.parametrize(
    "place",
    [
        *("after_group:kill9@1", *slow("before_manifest:kill9@0")),
        *slow("before_folder_is_named:kill9@0", "before_rename:kill9@0", "before_group:kill9@2"),
    ],
)
def test_killed_anywhere_and_repeated_gives_the_same_bytes(tmp_path, place):
    source = write_jsonl(tmp_path / "corpus.jsonl", MANY * 60)
    flags = ("--shard_tokens=100k", "--val_tokens=30k", "--num_workers=1", "--group_bytes=700k")
    worked(call("prepare_data.py", source, f"--out={tmp_path / 'straight'}", *flags))
    assert len(snapshot(tmp_path / "straight")) > 5
    assert exit_code(start(source, tmp_path / "out", *flags, fault=f"data.{place}")) == -9
    assert not (tmp_path / "out").exists()
    assert exit_code(start(source, tmp_path / "out", *flags)) == 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "straight")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_sigterm_ends_it_with_one_line_and_the_same_line_goes_on(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", MANY * 60)
    flags = ("--shard_tokens=100k", "--val_tokens=30k", "--num_workers=2", "--group_bytes=700k")
    process = start(source, tmp_path / "out", *flags, fault="data.after_group:sleep600@1")
    done = tmp_path / "out.partial" / "groups" / "group_00001"
    while not done.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    _, error = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    (line,) = (line for line in error.splitlines() if "error" in line)
    assert re.search(r"error: interrupted; 2 of \d+ groups are kept in .*out.partial", line)
    assert "Traceback" not in error
    assert exit_code(start(source, tmp_path / "out", *flags)) == 0
    assert_divided(tmp_path / "out", MANY * 60)


def test_a_start_after_the_last_rename_finds_the_work_done(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", MANY)
    fault = "data.after_folder_is_named:kill9@0"
    assert exit_code(start(source, tmp_path / "out", fault=fault)) == -9
    assert run_prepare(source, tmp_path / "out", shard_tokens=100_000_000) is None
    open_data(tmp_path / "out", vocab_size=50304)


@pytest.mark.slow
def test_killed_at_random_instants_by_workers_or_parent_gives_the_same_bytes(tmp_path):
    """The parent takes its workers along, and what a worker's death ends says so and can be repeated."""
    source = write_jsonl(tmp_path / "corpus.jsonl", MANY * 120)
    flags = ("--shard_tokens=150k", "--num_workers=2", "--group_bytes=700k")
    assert exit_code(start(source, tmp_path / "straight", *flags)) == 0
    dice = random.Random(7)
    interrupted = 0
    while interrupted < 2 or not (tmp_path / "out").exists():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)  # it ended before it was killed twice
        process = start(source, tmp_path / "out", *flags)
        family = psutil.Process(process.pid)
        # Not for readiness: the instant is the experiment. Later ones come later, so that a slow machine ends too.
        time.sleep(dice.uniform(0.5, 4.0 + interrupted))
        if process.poll() is not None:
            assert exit_code(process) == 0
            continue
        try:
            children = family.children(recursive=True)
            workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            victim = dice.choice([family, *workers])
            victim.kill()
        except psutil.NoSuchProcess:  # it ended just now
            assert exit_code(process) == 0
            continue
        _, said = process.communicate(timeout=HANG_SECONDS)
        interrupted += 1
        if victim is not family and not (tmp_path / "out").exists():  # at the end none is needed
            assert process.returncode == 2
            assert "a tokenizing process died" in said.splitlines()[-1]
        _, alive = psutil.wait_procs(workers, timeout=HANG_SECONDS)
        assert not alive, "a worker outlived its parent"
        assert interrupted < 60
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one text", "many lines"])
def test_memory_is_bounded_whatever_the_size_of_the_input(tmp_path, shape):
    """300 MB of text with shards of 100M tokens: parent and workers together below 1 GB."""
    block = "".join(MANY) * 20
    source = tmp_path / ("big.txt" if shape == "one text" else "big.jsonl")
    with open(source, "w") as file:
        size = 0
        while size < 300_000_000:
            size += file.write(block if shape == "one text" else json.dumps({"text": block}) + "\n")
    process = start(source, tmp_path / "out", "--num_workers=2")
    parent, peak, seen = psutil.Process(process.pid), 0, 0
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [parent, *parent.children(recursive=True)]
            peak, seen = max(peak, sum(p.memory_info().rss for p in family)), max(seen, len(family))
        time.sleep(0.02)
    assert exit_code(process) == 0
    assert seen >= 3
    assert peak < 1e9
