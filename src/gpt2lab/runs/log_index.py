"""A compact index beside metrics.jsonl: columns of its steps, all other events, and its damaged lines.

The log is the truth, and the index a function of it: a row of chunks, one for each megabyte of whole lines. Lines that
it does not cover yet are read from the log; chunks that do not fit the log any more are made again. So an index may be
deleted at any time and need not be flushed. No torch.

A chunk is a line `<crc32 of the rest, begun with the version> <JSON>`, and then each column of its steps, compressed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpt2lab.checkpoint.catalog import METRICS
from gpt2lab.files import open_regular
from gpt2lab.runs.events import FLOATS, INTEGERS, Event, parse_line, problem_of

INDEX = "metrics.index"
BLOCK = 1 << 20  # bytes of the log that a chunk covers, up to the end of a line
# The log grows by a 64th between two updates by its writer: reading the index costs, too.
_GROWTH = 64
_VERSION = 2  # of what counts as an event: an index of another one is made again
NAMED_LINES = 3  # damaged lines of a chunk that are named; the others are counted

_COLUMNS = (*INTEGERS, *FLOATS)
# An index may lie in a folder of somebody else's making, so that no link is followed.
_READ = os.O_RDONLY | os.O_NOFOLLOW
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


@dataclass(frozen=True)
class Chunk:
    """The events of some lines of a log that follow each other."""

    first: int  # bytes of the log
    end: int
    crc: int  # of these bytes
    lines: int
    rows: int  # steps among them
    # All others, each with the number of the chunk's steps before it.
    events: list[tuple[int, Event]]
    damaged: list[tuple[int, str]]  # line within the chunk, from 1, and what it is; at most three
    num_damaged: int
    sizes: list[int]  # bytes of each column
    sums: list[int]  # crc32 of each column
    at: int  # of the first column in the index
    payload: bytes | None = None  # the columns of a chunk that is not in the index

    def column(self, name: str, index: IO[bytes] | None) -> np.ndarray:
        """Return one number for each step; `index` is the open index of a chunk that is in one.

        Raises: OSError, ValueError or zlib.error if the index is not what it was.
        """
        number = _COLUMNS.index(name)
        at, size = sum(self.sizes[:number]), self.sizes[number]
        if self.payload is not None:
            data = self.payload[at : at + size]
        else:
            assert index is not None
            data = os.pread(index.fileno(), size, self.at + at)
        if zlib.crc32(data) != self.sums[number]:
            raise ValueError(f"{INDEX}: not the column {name}")
        length = self.rows * np.dtype(dtype_of(name)).itemsize
        content = zlib.decompressobj().decompress(data, length + 1)
        if len(content) != length:
            raise ValueError(f"{INDEX}: not {self.rows} steps")
        return np.frombuffer(content, dtype_of(name))


def open_index(run_dir: Path) -> IO[bytes]:
    """Open the index of a run's log.

    Raises: OSError.
    """
    return open_regular(run_dir / INDEX, flags=_READ)


def dtype_of(name: str) -> str:
    """Return numpy's type of a column."""
    return "<u4" if name in INTEGERS else "<f8"


def make_chunk(block: bytes, first: int) -> Chunk:
    """Index whole lines of the log that begin at byte `first`."""
    lines = block.split(b"\n")[:-1]
    rows: list[list[Any]] = []
    events: list[tuple[int, Event]] = []
    damaged: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = parse_line(line)
        except ValueError as error:
            damaged.append((number, str(error)))
            continue
        if event["event"] == "step":
            rows.append([event.get(name) for name in _COLUMNS])
        else:
            events.append((len(rows), event))
    columns = [_encode(name, [row[i] for row in rows]) for i, name in enumerate(_COLUMNS)]
    return Chunk(
        first=first,
        end=first + len(block),
        crc=zlib.crc32(block),
        lines=len(lines),
        rows=len(rows),
        events=events,
        damaged=damaged[:NAMED_LINES],
        num_damaged=len(damaged),
        sizes=[len(column) for column in columns],
        sums=[zlib.crc32(column) for column in columns],
        at=0,
        payload=b"".join(columns),
    )


def _encode(name: str, values: list[Any]) -> bytes:
    numbers = [value if isinstance(value, int | float) else np.nan for value in values]
    try:
        column = np.array(numbers, dtype_of(name))
    except OverflowError:  # an integer of hundreds of digits
        column = np.array([float(min(max(n, -1e300), 1e300)) for n in numbers], dtype_of(name))
    return zlib.compress(column.tobytes(), 1)


def read_chunks(run_dir: Path) -> list[Chunk]:
    """Return chunks that cover all whole lines of a run's log; bring its index up to date if it may be written.

    Raises: OSError.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    with open(path, "rb") as log, contextlib.ExitStack() as stack:
        chunks, index_size = _fitting(run_dir, log)
        covered = chunks[-1].end if chunks else 0
        index: IO[bytes] | None = None
        if os.fstat(log.fileno()).st_size - covered >= BLOCK:
            index = _open_to_append(run_dir, chunks, index_size, stack)
        for block in _blocks(log, covered):
            chunk = make_chunk(block, covered)
            covered = chunk.end
            if index is not None and len(block) >= BLOCK:
                try:
                    chunk = _append(index, chunk)
                except OSError:  # a full disk; the next update cuts what is torn
                    index = None
            chunks.append(chunk)
    return chunks


def update(run_dir: Path, written: int) -> bool:
    """Bring a run's index up to date if `written` bytes of new lines are worth it, and tell whether they were."""
    if written < BLOCK:
        return False
    with contextlib.suppress(OSError):
        if written >= (run_dir / METRICS).stat().st_size // _GROWTH:
            read_chunks(run_dir)
            return True
    return False


def _blocks(log: IO[bytes], at: int) -> Iterator[bytes]:
    """Yield the whole lines of a log from byte `at` on, at least a megabyte each but the last."""
    log.seek(at)
    while block := log.read(BLOCK):
        if not block.endswith(b"\n"):
            block += log.readline()
        # An unterminated last line is being written, or torn.
        whole = block[: block.rfind(b"\n") + 1]
        if whole:
            yield whole
        if len(whole) < BLOCK:
            return


def _fitting(run_dir: Path, log: IO[bytes]) -> tuple[list[Chunk], int]:
    """Return the chunks of the index up to the last whose bytes are those of the log, and the size of the index."""
    try:
        with open_regular(run_dir / INDEX, flags=_READ) as index:
            chunks, size = list(_stored(index)), os.fstat(index.fileno()).st_size
    except OSError:
        return [], 0
    log_size = os.fstat(log.fileno()).st_size
    while chunks:
        last = chunks[-1]
        if last.end > log_size:
            chunks.pop()
            continue
        log.seek(last.first)
        if zlib.crc32(log.read(last.end - last.first)) == last.crc:
            break
        chunks.pop()
    return chunks, size


def _stored(index: IO[bytes]) -> Iterator[Chunk]:
    """Yield the chunks of an index up to the first that is torn or damaged."""
    size, end = os.fstat(index.fileno()).st_size, 0
    while line := index.readline():
        crc, _, body = line.partition(b" ")
        try:
            if int(crc, 16) != zlib.crc32(body, _VERSION):
                return
            chunk = Chunk(**json.loads(body), at=index.tell())
            is_sound = _is_sound(chunk)
        except (ValueError, TypeError, RecursionError):
            return
        after = chunk.at + sum(chunk.sizes) if is_sound else 0
        if not is_sound or chunk.first != end or after > size:
            return
        end = chunk.end
        index.seek(after)
        yield chunk


def _is_sound(chunk: Chunk) -> bool:
    """Tell whether a chunk can be one of ours: what memory and loops depend on.

    Raises: TypeError or ValueError if it cannot.
    """
    numbers = (chunk.first, chunk.end, chunk.crc, chunk.lines, chunk.rows, chunk.num_damaged)
    return (
        all(type(number) is int and number >= 0 for number in (*numbers, *chunk.sizes, *chunk.sums))
        and len(chunk.sizes) == len(chunk.sums) == len(_COLUMNS)
        and chunk.first + chunk.rows < chunk.end
        and all(type(row) is int and 0 <= row <= chunk.rows for row, _ in chunk.events)
        and all(problem_of(event) is None for _, event in chunk.events)
        and all(type(line) is int and type(what) is str for line, what in chunk.damaged)
    )


def _open_to_append(
    run_dir: Path, chunks: list[Chunk], size: int, stack: contextlib.ExitStack
) -> IO[bytes] | None:
    """Return the index, locked and cut after these chunks; None if it cannot be written or another process has."""
    try:
        index = stack.enter_context(open_regular(run_dir / INDEX, "ab", _APPEND))
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(index.fileno()).st_size != size:
            return None
        index.truncate(chunks[-1].at + sum(chunks[-1].sizes) if chunks else 0)
    except OSError:
        return None
    return index


def _append(index: IO[bytes], chunk: Chunk) -> Chunk:
    """Write a chunk to the end of the index and return it as one that lies there.

    Raises: OSError.
    """
    assert chunk.payload is not None
    fields = {name: value for name, value in vars(chunk).items() if name not in ("at", "payload")}
    body = json.dumps(fields).encode() + b"\n"
    head = b"%08x %s" % (zlib.crc32(body, _VERSION), body)
    at = os.fstat(index.fileno()).st_size + len(head)
    index.write(head + chunk.payload)
    index.flush()
    return Chunk(**fields, at=at)
