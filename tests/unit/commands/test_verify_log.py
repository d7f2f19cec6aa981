"""`runs verify` names every line of a log that is not as it was written."""

from __future__ import annotations

import pytest

import launch
from gpt2lab.commands.runs import verify_log
from gpt2lab.runs import history
from gpt2lab.runs.logger import MetricsLogger

# Lines of an earlier version, without checksums.
_OLD = b"".join(
    b'{"event": "step", "time": 1.0, "attempt": 1, "step": %d}\n' % step for step in (1, 2)
)


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (3, b"10.25", b"90.25"),
        (1, b'"}\n', b'0"}\n'),
        (8, b'"lr"', b'"lR"'),
        (5, b"10.25", b"1e999"),
    ],
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
    assert log.numbers.tolist() == kept == [e["step"] for e in history.read_events(tmp_path)]
    assert f"line {number}: " in str(log.problem)
    code, said, _ = launch.call("runs verify", tmp_path)
    assert (code, f"metrics.jsonl line {number}: " in said) == (1, True)
    del lines[number - 1]
    path.write_bytes(b"".join(lines))
    (gap,) = verify_log(tmp_path)[0] if 1 < number < 8 else [f"{number}"]
    assert f"{number}" in gap


def test_lines_of_an_earlier_version_are_not_checked(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(_OLD)
    logger = MetricsLogger(tmp_path, attempt=1)
    logger.event("step", 3)
    logger.close()
    assert verify_log(tmp_path) == ([], 3, 1)
    assert "crc" not in history.read_events(tmp_path)[-1]
