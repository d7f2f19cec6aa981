"""`runs verify` names every line of a log that is not as it was written."""

import contextlib
import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

import launch
from gpt2lab.commands.runs import remove_damaged_lines, verify_log
from gpt2lab.errors import SaveError
from gpt2lab.runs import history
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.history import open_log
from gpt2lab.runs.logger import MetricsLogger
from launch import append, call
from long_logs import damage_lines, lines_of_a_start
from plain_log import read_events


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [(3, b"10.25", b"90.25"), (1, b'"}\n', b'0"}\n'), (5, b"10.25", b"1e999")],
)
def test_a_line_that_is_not_what_was_written_is_named_and_left_out(tmp_path, number, old, new):
    logger = MetricsLogger(tmp_path, attempt=1)
    for step in range(1, 9):
        logger.event("step", step, loss=10.25, lr=1e-3)
    logger.close()
    code, said, _ = launch.call("runs verify", tmp_path)
    assert (code, history.open_log(tmp_path).problem) == (0, None)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    path.write_bytes(b"".join(lines))
    kept = [step for step in range(1, 9) if step != number]
    log = history.open_log(tmp_path)
    assert log.numbers.tolist() == kept == [e["step"] for e in read_events(tmp_path)]
    assert f"line {number}: " in str(log.problem)
    code, said, _ = launch.call("runs verify", tmp_path)
    assert (code, f"metrics.jsonl line {number}: " in said) == (1, True)
    del lines[number - 1]
    path.write_bytes(b"".join(lines))
    (gap,) = verify_log(tmp_path)[0] if 1 < number < 8 else [f"{number}"]
    assert f"{number}" in gap
    append(tmp_path, event="step", attempt=2, step=21)
    assert verify_log(tmp_path)[0][-1].endswith("no steps 9 to 20 before step 21 of start 2")


def test_lines_of_an_earlier_version_are_not_checked(tmp_path):
    for step in (1, 2):
        append(tmp_path, event="step", attempt=1, step=step)  # without a checksum
    logger = MetricsLogger(tmp_path, attempt=1)
    logger.event("step", 3)
    logger.close()
    assert verify_log(tmp_path) == ([], 3, 1)
    assert "crc" not in read_events(tmp_path)[-1]


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(lines_of_a_start(300)))
    return tmp_path


def test_repair_removes_damaged_lines_and_keeps_the_original(run_dir):
    log = run_dir / "metrics.jsonl"
    (run_dir / "config.json").write_text("{}")
    damage_lines(log, 5, 200)
    with open(log, "ab") as file:
        file.write(b'{"event": "step"')
    spoilt, expected = log.read_bytes(), read_events(run_dir)
    with contextlib.closing(RunFolder(run_dir)):
        code, _, error = call("runs repair-log", run_dir)
        assert (code, "in use by" in error) == (2, True)
    code, said, error = call("runs repair-log", run_dir)
    assert (code, error) == (0, "")
    assert "metrics.jsonl line 5: not JSON" in said
    assert "metrics.jsonl line 200: not JSON" in said
    assert "3 damaged lines removed" in said
    [original] = run_dir.glob("metrics.jsonl.damaged-*")
    assert original.read_bytes() == spoilt
    assert (open_log(run_dir).problem, read_events(run_dir)) == (None, expected)
    assert log.read_bytes().endswith(b"\n")
    repaired = log.read_bytes()
    assert "no damaged line" in call("runs repair-log", run_dir)[1]
    assert log.read_bytes() == repaired
    assert list(run_dir.glob("metrics.jsonl.damaged-*")) == [original]


def test_a_repair_that_fails_leaves_the_log(run_dir, monkeypatch):
    log = run_dir / "metrics.jsonl"
    damage_lines(log, 5)
    before = log.read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    with pytest.raises(SaveError, match="cannot be repaired"):
        remove_damaged_lines(log)
    assert log.read_bytes() == before
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
