"""A long metrics.jsonl: its index says what the log says, costs little, and may be lost or damaged."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2lab.commands.repair_log import remove_damaged_lines
from gpt2lab.errors import SaveError
from gpt2lab.planner import remaining
from gpt2lab.report import curves
from gpt2lab.report import page as report
from gpt2lab.runs import history, log_index, overview, summary
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.history import current, newest_event, open_log, read_events, read_log
from gpt2lab.runs.log_index import FLOATS, INDEX, read_chunks
from gpt2lab.runs.logger import MetricsLogger
from launch import call
from long_logs import lines_of_a_start, write_long_log
from whole_run import Run

LINES = 20_000  # of the log whose cost is measured


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a chunk cover 8 kB, a dozen lines, so that a short log has many."""
    monkeypatch.setattr(log_index, "BLOCK", 8192)


@pytest.fixture
def run_dir(tmp_path: Path, small_blocks: None) -> Path:
    """Return a run of three starts with a rewind, 900 steps, and a step that nobody logged a start before."""
    rewound = {"event": "rewind", "time": 1.7e9, "attempt": 2, "step": 350, "spike_step": 400}
    again = [line for line in lines_of_a_start(2, attempt=3, first=499) if '"step",' in line]
    lines = [
        *lines_of_a_start(300),
        *lines_of_a_start(150, attempt=2, first=251),
        json.dumps(rewound) + "\n",
        *lines_of_a_start(150, attempt=2, first=351),
        *lines_of_a_start(299, attempt=3, first=401),
        *again,
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def plain_spent_seconds(events: list[dict[str, Any]]) -> float:
    spent: dict[int, float] = {}
    for event in events:
        attempt = event["attempt"]
        if event["event"] == "step":
            spent[attempt] = event["elapsed_seconds"]
        elif event["event"] != "done":
            spent[attempt] = spent.get(attempt, 0.0) + (event.get("seconds") or 0.0)
    return sum(spent.values())


def assert_says_what_the_log_says(run_dir: Path) -> None:
    events, log = read_events(run_dir), open_log(run_dir)
    steps = current(events, "step")
    assert log.events == [event for event in events if event["event"] != "step"]
    assert log.numbers.tolist() == sorted(steps)
    for name in ("attempt", *FLOATS):
        expected = [steps[number].get(name) for number in sorted(steps)]
        expected = [np.nan if value is None else value for value in expected]
        np.testing.assert_array_equal(log.column(name), expected)
    assert [log.step(number) for number in sorted(steps)][::41] == [
        steps[number] for number in sorted(steps)
    ][::41]
    assert log.step(0) is log.step(10**6) is None
    assert log.last_step() == steps[max(steps)]
    assert {event["step"]: event for event in log.current_steps()} == steps
    assert log.current("eval") == current(events, "eval")
    assert log.last_attempt == max(event["attempt"] for event in events)
    last = [e for e in events if e["attempt"] == log.last_attempt and e["event"] == "step"]
    assert log.last_start("step").tolist() == [event["step"] for event in last]
    assert log.farthest_step(2) == 500
    assert log.spent_seconds() == plain_spent_seconds(events)
    assert log.peak_memory() == 338096128
    assert newest_event(run_dir) == events[-1]


def test_the_index_says_what_the_log_says(run_dir: Path) -> None:
    assert_says_what_the_log_says(run_dir)  # makes it
    assert len(read_chunks(run_dir)) > 50
    assert (run_dir / INDEX).stat().st_size > 0
    before = (run_dir / INDEX).read_bytes()
    assert_says_what_the_log_says(run_dir)
    assert (run_dir / INDEX).read_bytes() == before


def test_the_index_is_a_function_of_the_log(run_dir: Path) -> None:
    """However often and wherever the log stood when it was brought up to date, also within a line."""
    read_chunks(run_dir)
    at_once, content = (run_dir / INDEX).read_bytes(), (run_dir / "metrics.jsonl").read_bytes()
    (run_dir / INDEX).unlink()
    for end in (*range(1000, len(content), 77_777), len(content)):
        (run_dir / "metrics.jsonl").write_bytes(content[:end])
        read_chunks(run_dir)
    assert (run_dir / INDEX).read_bytes() == at_once


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[: len(content) // 3] + bytes(len(content) * 2 // 3),
        lambda content: b"",
        lambda content: b"\n" + content,
        lambda content: content + b'00000000 {"first": 0}\n',
        lambda content: b"\xff" * len(content),
        flip_a_bit,
    ],
    ids=["torn", "half", "zeros", "empty", "shifted", "more", "noise", "bit"],
)
def test_a_damaged_index_is_not_believed(run_dir: Path, damage: Callable[[bytes], bytes]) -> None:
    read_chunks(run_dir)
    sound = (run_dir / INDEX).read_bytes()
    (run_dir / INDEX).write_bytes(damage(sound))
    assert_says_what_the_log_says(run_dir)


def test_an_index_is_opened_once_for_a_column(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_chunks(run_dir)
    log = read_log(run_dir)
    opened: list[Path] = []
    plain = log_index.open_regular

    def count(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return plain(path, *args, **options)

    monkeypatch.setattr(log_index, "open_regular", count)
    assert len(log.column("loss")) > 0
    assert opened == [run_dir / INDEX]


@pytest.mark.parametrize("kept", [0, 100, 5000, 200_000])
def test_an_index_of_another_log_is_made_again(run_dir: Path, kept: int) -> None:
    """As after a power cut that took the end of the log, or another log in its place."""
    read_chunks(run_dir)
    log = run_dir / "metrics.jsonl"
    head = log.read_bytes()[:kept].rpartition(b"\n")[0]
    lines = head.splitlines(keepends=True)
    log.write_bytes(b"".join([*lines, b"\n"] if lines else []))
    with open(log, "a") as file:
        file.writelines(lines_of_a_start(500, attempt=2, first=1))
        file.writelines(lines_of_a_start(200, attempt=4, first=301))
    assert_says_what_the_log_says(run_dir)
    again = (run_dir / INDEX).read_bytes()
    (run_dir / INDEX).unlink()
    read_chunks(run_dir)
    assert (run_dir / INDEX).read_bytes() == again


def test_an_index_that_cannot_be_written_is_done_without(run_dir: Path) -> None:
    (run_dir / INDEX).mkdir()
    assert_says_what_the_log_says(run_dir)
    (run_dir / INDEX).rmdir()
    with open(run_dir / INDEX, "ab") as file:  # another process brings it up to date
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_says_what_the_log_says(run_dir)
        assert (run_dir / INDEX).read_bytes() == b""
    assert_says_what_the_log_says(run_dir)
    assert (run_dir / INDEX).stat().st_size > 0


def test_an_index_that_is_replaced_while_it_is_read_gives_no_other_numbers(run_dir: Path) -> None:
    log = open_log(run_dir)
    expected = log.column("loss").copy()
    index = run_dir / INDEX
    index.write_bytes(index.read_bytes()[700:])
    np.testing.assert_array_equal(log.column("loss"), expected)
    (run_dir / "metrics.jsonl").write_text("other\n" * 10**6)
    with pytest.raises(history.GPT2LabError, match="changed while it was read"):
        log.column("loss")


def test_a_line_damaged_after_it_was_indexed_is_left_out_and_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "metrics.jsonl"
    number = 100
    expected = {event["step"]: event for event in open_log(run_dir).current_steps()}
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if f'"step": {number},'.encode() in line)
    for damaged in (
        b"#" * (len(lines[at]) - 1) + b"\n",
        lines[at].replace(b'"step": 100', b'"step": 901'),
    ):
        path.write_bytes(b"".join([*lines[:at], damaged, *lines[at + 1 :]]))
        log = read_log(run_dir)
        assert log.step(number) is None
        assert {event["step"]: event for event in log.current_steps()} == {
            step: event for step, event in expected.items() if step != number
        }
        assert set(log.recorded_after(number + 1)) == {"step"}
        assert "metrics.jsonl: damaged after it was written" in capsys.readouterr().err
        history.warn_once.cache_clear()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_an_index_that_is_no_regular_file_is_not_touched(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """A run's folder may come from somebody else: status.py must neither hang on it nor write through it."""
    precious = tmp_path_factory.mktemp("home") / "precious"
    precious.write_text("mine")
    if kind == "link":
        (run_dir / INDEX).symlink_to(precious)
    else:
        os.mkfifo(run_dir / INDEX)
    assert_says_what_the_log_says(run_dir)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    "lie",
    [
        {"rows": 10**15},
        {"rows": -1},
        {"sizes": [-500, *[0] * 13]},
        {"sizes": []},
        {"sums": None},
        {"end": 0},
        {"end": 150.5},
        {"end": 10**13},
        {"end": 10**30},
        {"first": "0"},
        {"events": [[0, {"event": "eval"}]]},
        {"events": [[10**9, None]]},
        {"events": [[0.5, {"event": "eval", "time": 1, "attempt": 1, "step": 0}]]},
        {"events": 5},
        {"damaged": [[1, None]]},
        {"lines": 1e400},
        {"surprise": 1},
    ],
)
def test_an_index_that_lies_with_a_sum_that_holds_is_not_believed(
    run_dir: Path, lie: dict[str, Any]
) -> None:
    read_chunks(run_dir)
    head, _, rest = (run_dir / INDEX).read_bytes().partition(b"\n")
    body = json.dumps(json.loads(head.partition(b" ")[2]) | lie).encode() + b"\n"
    (run_dir / INDEX).write_bytes(b"%08x %s" % (zlib.crc32(body, log_index._VERSION), body) + rest)
    assert_says_what_the_log_says(run_dir)


def test_an_index_with_another_number_of_steps_is_one_line(run_dir: Path) -> None:
    read_chunks(run_dir)
    head, _, rest = (run_dir / INDEX).read_bytes().partition(b"\n")
    body = json.dumps(json.loads(head.partition(b" ")[2]) | {"rows": 3}).encode() + b"\n"
    (run_dir / INDEX).write_bytes(b"%08x %s" % (zlib.crc32(body, log_index._VERSION), body) + rest)
    with pytest.raises(
        history.GPT2LabError, match=r"its index is not of it; delete metrics\.index"
    ):
        open_log(run_dir)


def test_a_run_brings_its_index_up_to_date(tmp_path: Path, small_blocks: None) -> None:
    logger = MetricsLogger(tmp_path, attempt=1)
    for step in range(1, 1001):
        logger.event("step", step, loss=1.0, step_seconds=0.1)
    logger.close()
    covered = log_index.read_chunks(tmp_path)
    stored = [chunk for chunk in covered if chunk.payload is None]
    written = (tmp_path / "metrics.jsonl").stat().st_size
    assert written - stored[-1].end < 3 * log_index.BLOCK
    assert sum(chunk.rows for chunk in covered) == 1000


# -- what it costs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    """Return a run with a log of 13 MB and the settings of a tiny run."""
    folder = Path(shutil.copytree(straight.path, tmp_path_factory.mktemp("long") / "r"))
    write_long_log(folder, LINES, tokens_per_step=128)
    return folder


READERS: dict[str, Callable[[Path], object]] = {
    "start": lambda run_dir: read_log(run_dir).step(10_000),
    "attempt": newest_event,
    "status": overview.read_run,
    "end": summary.describe_run,
    "eta": remaining.estimate_remaining,
    "curves": curves.read_curves,
}


def bytes_read() -> int:
    """Return the bytes that this process has read so far, from disk or cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", READERS)
def test_a_long_log_costs_few_bytes_and_little_memory(long_run: Path, name: str) -> None:
    """A million lines, 640 MB, must not cost 100 MB of memory: as dictionaries they take 3.5 GB."""
    size = (long_run / "metrics.jsonl").stat().st_size
    budget = 100 * LINES + 8 * log_index.BLOCK  # some blocks are parsed at a time
    if name == "start":  # the index is made: all is read once, little is held
        (long_run / INDEX).unlink(missing_ok=True)
        tracemalloc.start()
        read_chunks(long_run)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < budget
    read_chunks(long_run)
    assert (long_run / INDEX).stat().st_size < size / 10
    tracemalloc.start()
    before = bytes_read()
    assert READERS[name](long_run)
    read, peak = bytes_read() - before, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read < size / 8 + 6 * log_index.BLOCK < size
    assert peak < budget


def test_the_page_of_a_long_log_is_small_and_costs_little_memory(long_run: Path) -> None:
    read_chunks(long_run)
    tracemalloc.start()
    page = report.render(long_run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * LINES + 8 * log_index.BLOCK
    assert len(page) < 500_000
    paths = re.findall(r' d="([^"]*)"', page)
    assert 500 < max(path.count("L") for path in paths) < 800  # the extremes of 400 stretches


# -- damaged lines, and their repair -----------------------------------------------------------------------------


def damage_lines(path: Path, *numbers: int) -> bytes:
    """Spoil lines of a log, by number from 1, and return what it was."""
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    for number in numbers:
        lines[number - 1] = lines[number - 1][:40] + b"\n"
    path.write_bytes(b"".join(lines))
    return before


def test_damaged_lines_far_into_a_log_are_named(run_dir: Path) -> None:
    damage_lines(run_dir / "metrics.jsonl", 7, 500, 501, 502, 700)
    for _ in range(2):  # without an index, and with one
        problem = str(open_log(run_dir).problem)
        assert all(f"line {number}: not JSON" in problem for number in (7, 500, 501))
        assert "and 2 more" in problem
    assert overview.read_run(run_dir).problem == problem


def test_repair_removes_damaged_lines_and_keeps_the_original(run_dir: Path) -> None:
    log = run_dir / "metrics.jsonl"
    (run_dir / "config.json").write_text("{}")
    damage_lines(log, 5, 600)
    with open(log, "ab") as file:
        file.write(b'{"event": "step"')
    spoilt, expected = log.read_bytes(), read_events(run_dir)
    with contextlib.closing(RunFolder(run_dir)):
        code, _, error = call("repair_log.py", run_dir)
        assert (code, "in use by" in error) == (2, True)
    code, said, error = call("repair_log.py", run_dir)
    assert (code, error) == (0, "")
    assert "metrics.jsonl line 5: not JSON" in said
    assert "metrics.jsonl line 600: not JSON" in said
    assert "3 damaged lines removed" in said
    [original] = run_dir.glob("metrics.jsonl.damaged-*")
    assert original.read_bytes() == spoilt
    assert (open_log(run_dir).problem, read_events(run_dir)) == (None, expected)
    assert log.read_bytes().endswith(b"\n")
    assert_says_what_the_log_says(run_dir)
    repaired = log.read_bytes()
    assert "no damaged line" in call("repair_log.py", run_dir)[1]
    assert log.read_bytes() == repaired
    assert list(run_dir.glob("metrics.jsonl.damaged-*")) == [original]


def test_a_repair_that_fails_leaves_the_log(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run_dir / "metrics.jsonl"
    damage_lines(log, 5)
    before = log.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SaveError, match="cannot be repaired"):
        remove_damaged_lines(log)
    assert log.read_bytes() == before
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


def test_a_log_without_a_single_event_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("no\n")
    with pytest.raises(history.GPT2LabError, match="line 1: not JSON"):
        read_log(tmp_path)
    assert "line 1" in str(overview.read_run(tmp_path).problem)


def test_a_resume_over_damaged_lines_continues_with_the_same_bits(
    run: Run, straight: Run, small_blocks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--max_steps=26", "--eval_freq=4", "--checkpoint_freq=5", "--log_freq=10"]
    run.train(*common, "--stop_after_steps=15")
    damage_lines(run.path / "metrics.jsonl", 9)
    run.train(*common, "--resume=10")
    assert "line 9: not JSON" in capsys.readouterr().err
    [resumed] = run.events("resume")
    assert resumed["verified_batches"] == [10, 11]
    assert run.losses(attempt=2) == {n: loss for n, loss in straight.losses().items() if n > 10}


# -- the ends of a log -------------------------------------------------------------------------------------------


def test_the_newest_event_is_found_before_long_and_damaged_lines(
    tmp_path: Path, small_blocks: None
) -> None:
    assert newest_event(tmp_path) is None
    event = {"event": "eval", "time": 1.0, "attempt": 3, "step": 7, "val_loss": None}
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(lines_of_a_start(20))
        file.write(json.dumps(event) + "\n" + "x" * 50_000 + "\n" + '{"event": "st')
    assert newest_event(tmp_path) == event


def test_a_long_torn_line_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2lab.runs.logger._BLOCK", 100)
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(lines_of_a_start(5)))
    whole = log.read_bytes()
    for torn in (b"x" * 1000, b"x" * 100, b"x"):
        log.write_bytes(whole + torn)
        MetricsLogger(tmp_path, attempt=2).close()
        assert log.read_bytes() == whole
