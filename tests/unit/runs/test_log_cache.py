"""metrics.cache: what was decoded once is not decoded again, and a cache that does not fit its log is not believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from gpt2lab.errors import GPT2LabError
from gpt2lab.runs import log_cache
from gpt2lab.runs.events import COLUMNS
from gpt2lab.runs.history import current, open_log, read_events, read_log
from gpt2lab.runs.log_cache import CACHE
from launch import call
from long_logs import lines_of_a_start


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    """Return a run of two starts and 800 steps; blocks and what is worth a cache are small."""
    monkeypatch.setattr(log_cache, "BLOCK", 40_000)
    monkeypatch.setattr(log_cache, "LEAST", 100_000)
    lines = [*lines_of_a_start(500), *lines_of_a_start(300, attempt=2, first=401)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def decoded_lines(monkeypatch) -> list[bytes]:
    """Return the list of the lines that are decoded from now on."""
    lines: list[bytes] = []
    plain = log_cache.decode_step

    def count(line: bytes) -> object:
        lines.append(line)
        return plain(line)

    monkeypatch.setattr(log_cache, "decode_step", count)
    return lines


def assert_says_what_the_log_says(run_dir: Path) -> None:
    events, log = read_events(run_dir), open_log(run_dir)
    steps = current(events, "step")
    assert log.events == [event for event in events if event["event"] != "step"]
    assert log.numbers.tolist() == sorted(steps)
    for name in COLUMNS:
        expected = [steps[number].get(name, np.nan) for number in sorted(steps)]
        np.testing.assert_array_equal(log.column(name), expected)
    assert list(log.current_steps()) == list(steps.values())
    assert log.last_step() == steps[max(steps)]


def bytes_read() -> int:
    """Return the bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_second_reader_decodes_what_was_appended(run_dir, decoded_lines):
    log = run_dir / "metrics.jsonl"
    assert_says_what_the_log_says(run_dir)
    assert len(decoded_lines) == len(log.read_bytes().splitlines())
    decoded_lines.clear()
    before = bytes_read()
    assert len(open_log(run_dir).column("loss")) == 700
    assert bytes_read() - before < log.stat().st_size / 4
    assert_says_what_the_log_says(run_dir)
    assert decoded_lines == []
    added = list(lines_of_a_start(60, attempt=3, first=701))
    with open(log, "a") as file:
        file.writelines([*added, '{"event": "st'])
    cache = (run_dir / CACHE).read_bytes()
    assert_says_what_the_log_says(run_dir)
    assert [line.decode() + "\n" for line in decoded_lines] == added
    assert (run_dir / CACHE).read_bytes() == cache  # not worth it yet


def test_a_cache_grows_with_its_log(run_dir, decoded_lines):
    open_log(run_dir)
    cache = (run_dir / CACHE).read_bytes()
    decoded_lines.clear()
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(lines_of_a_start(400, attempt=3, first=701))
    assert_says_what_the_log_says(run_dir)
    added = (run_dir / "metrics.jsonl").read_bytes().splitlines()[-406:]
    assert decoded_lines == added
    assert (run_dir / CACHE).read_bytes().startswith(cache)
    decoded_lines.clear()
    assert_says_what_the_log_says(run_dir)
    assert decoded_lines == []


def test_a_short_log_has_no_cache(run_dir, monkeypatch):
    monkeypatch.undo()
    assert_says_what_the_log_says(run_dir)
    assert not (run_dir / CACHE).exists()


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[: len(content) // 3] + bytes(len(content) * 2 // 3),
        lambda content: bytes(len(content)),
        lambda content: b"",
        lambda content: b"\n" + content,
        lambda content: content + b"more",
        lambda content: b"\xff" * len(content),
        flip_a_bit,
    ],
    ids=["torn", "half", "zero tail", "zeros", "empty", "shifted", "more", "noise", "bit"],
)
def test_a_damaged_cache_is_not_believed(run_dir, damage):
    open_log(run_dir)
    cache = run_dir / CACHE
    cache.write_bytes(damage(cache.read_bytes()))
    assert_says_what_the_log_says(run_dir)


@pytest.mark.parametrize("kept", [0, 100, 5000, 200_000])
def test_a_cache_of_another_log_is_made_again(run_dir, kept):
    """As after a power cut that took the end of the log, or with another log in its place."""
    open_log(run_dir)
    log = run_dir / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[: log.read_bytes().rfind(b"\n", 0, kept) + 1])
    with open(log, "a") as file:
        file.writelines(lines_of_a_start(900, attempt=3, first=301))
    assert_says_what_the_log_says(run_dir)


def test_a_step_is_read_from_the_log_itself(run_dir):
    open_log(run_dir)
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 100,', b'"step": 901,'))
    assert_says_what_the_log_says(run_dir)  # edited in place: seen by its time
    path.write_bytes(path.read_bytes().replace(b'"step": 200,', b'"step": 902,'))
    with open(path, "a") as file:
        file.writelines(lines_of_a_start(1, attempt=3, first=701))
    with pytest.raises(GPT2LabError, match="changed while it was read; try again"):
        open_log(run_dir).step(200)
    assert open_log(run_dir).step(200) is None
    assert_says_what_the_log_says(run_dir)


def test_what_a_resume_relies_on_is_compared_with_the_log(run_dir):
    open_log(run_dir)
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"bytes": 119000', b'"bytes": 117000'))
    with open(path, "a") as file:
        file.writelines(lines_of_a_start(1, attempt=3, first=701))
    with pytest.raises(GPT2LabError, match="changed while it was read; try again"):
        open_log(run_dir).recorded_after(250)
    assert open_log(run_dir).recorded_after(250)["checkpoint"]["bytes"] == 117_000


def test_damaged_lines_are_named_from_a_cache_too(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for number in (7, 300, 301, 302, 600):
        lines[number - 1] = b"\xff" + lines[number - 1][:40] + b"\n"
    path.write_bytes(b"".join(lines))
    for _ in range(2):
        problem = str(open_log(run_dir).problem)
        assert all(f"line {number}: not JSON" in problem for number in (7, 300, 301))
        assert "and 2 more" in problem
    (run_dir / "config.json").write_text("{}")
    assert "5 damaged lines removed" in call("runs repair-log", run_dir)[1]
    assert open_log(run_dir).problem is None
    assert_says_what_the_log_says(run_dir)


def test_a_folder_that_takes_no_file_has_no_cache(run_dir, monkeypatch):
    def fail(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(log_cache, "staged_file", fail)
        assert_says_what_the_log_says(run_dir)
        patch.setattr("tempfile.TemporaryFile", lambda: fail(run_dir))
        assert_says_what_the_log_says(run_dir)
    (run_dir / CACHE).mkdir()
    assert_says_what_the_log_says(run_dir)
    assert {path.name for path in run_dir.iterdir()} == {"metrics.jsonl", CACHE}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_cache_that_is_no_regular_file_is_not_followed(run_dir, kind):
    """A run's folder may come from somebody else: status must neither hang on it nor write through it."""
    precious = run_dir / "precious"
    precious.write_text("mine")
    if kind == "link":
        (run_dir / CACHE).symlink_to(precious)
    else:
        os.mkfifo(run_dir / CACHE)
    assert_says_what_the_log_says(run_dir)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    "lie",
    [
        *({"rows": 10**15}, {"rows": -1}, {"rows": 3}, {"sums": []}, {"sums": None}, {"begin": 5}),
        *({"end": 0}, {"end": 10**13}, {"end": 150.5}, {"others": [[0, "not base64"]]}),
        *({"others": [[10**9, ""]]}, {"others": 5}, {"crc": 1}),
    ],
)
def test_a_cache_that_lies_with_a_sum_that_holds_is_not_believed(run_dir, lie):
    read_log(run_dir)
    content = (run_dir / CACHE).read_bytes()
    length, _ = log_cache._HEAD.unpack_from(content)
    begin = log_cache._HEAD.size
    head = json.dumps(json.loads(content[begin : begin + length]) | lie).encode()
    head = log_cache._HEAD.pack(len(head), log_cache.zlib.crc32(head, log_cache._VERSION)) + head
    (run_dir / CACHE).write_bytes(head + content[begin + length :])
    assert_says_what_the_log_says(run_dir)
