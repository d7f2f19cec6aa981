"""Read metrics.jsonl in blocks: its steps as columns of numbers, other lines as they are. No torch.

Those of a long log are cached in a file beside it, so that the next reader decodes only what was appended. Whoever
reads writes it, in one step and only where it can; it may be deleted at any time. It is used if the last block that it
covers is still that of the log. A single step, as a resume needs it, is read from the log itself.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import operator
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import IO, Annotated, BinaryIO, cast

import msgspec
import numpy as np

from gpt2lab.errors import GPT2LabError
from gpt2lab.files import open_regular, regular, staged_file
from gpt2lab.runs.events import COLUMNS, as_step, decode_step, parse_line

CACHE = "metrics.cache"
BLOCK = 1 << 20  # bytes of the log, up to the end of a line
LEAST = 4 << 20  # bytes of the log that are worth a cache, and
_GROWTH = 8  # the part of the log
_VERSION = 1  # of what is cached

_TYPES = {"place": "<u8", "attempt": "<u4", "step": "<u4", **dict.fromkeys(COLUMNS, "<f8")}
_ROW = np.dtype(list(_TYPES.items()))
_ENDS = list(accumulate((np.dtype(kind).itemsize for kind in _TYPES.values()), initial=0))
_PLACES = {name: (i, *_ENDS[i : i + 2]) for i, name in enumerate(_TYPES)}  # bytes of a row
_HEAD = struct.Struct("<II")  # bytes of a block as JSON, and their crc32
_pack = struct.Struct(f"<QII{len(COLUMNS)}d").pack
_values_of = operator.attrgetter("attempt", "step", *COLUMNS)
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Block(msgspec.Struct):
    """Whole lines of a log that follow each other; their steps lie elsewhere, one column after another."""

    begin: _Count  # bytes of the log
    end: _Count
    crc: _Count  # of these bytes
    changed: _Count  # when the log was, before it was read: nanoseconds
    rows: _Count  # steps
    others: list[tuple[_Count, bytes]]  # number of the line within the block, from 0, and the line
    sums: list[int]  # crc32 of each column

    def is_sound(self, begin: int) -> bool:
        """Tell whether this can be the block that begins at a byte of the log."""
        rows = [line - count for count, (line, _) in enumerate(self.others)]
        return (
            self.begin == begin < begin + self.rows < self.end
            and all(0 <= row <= self.rows for row in rows)
            and len(self.sums) == len(_TYPES)
        )


_load_block = msgspec.json.Decoder(Block).decode


class Blocks:
    """The lines of a log."""

    def __init__(self, log: Path | bytes) -> None:
        """Read a file, or lines that are in no file.

        Raises: OSError.
        """
        self.blocks: list[Block] = []
        self._columns: list[bytes | int] = []  # of each block, or their place in the cache
        self._cache: BinaryIO | None = None
        self._log = log
        with open_lines(log) as file:
            if not isinstance(log, bytes):
                self._use_cache(log.with_name(CACHE), file)
            for block, columns in decoded(file, self._end):
                self.blocks.append(block)
                self._columns.append(columns)

    @property
    def _end(self) -> int:
        return self.blocks[-1].end if self.blocks else 0

    def _use_cache(self, path: Path, log: IO[bytes]) -> None:
        """Take the blocks that are cached, after adding new ones if they are worth it and the folder takes them."""
        with contextlib.suppress(OSError):
            self._load(open_regular(path), log)
        size = os.fstat(log.fileno()).st_size
        if size - self._end > max(LEAST, size // _GROWTH):
            with contextlib.suppress(OSError):  # no disk takes it: memory does
                self._load(self._save(path, log), log)

    def _load(self, cache: BinaryIO, log: IO[bytes]) -> None:
        """Take the blocks of a cache if it is of this log.

        Raises: OSError.
        """
        weakref.finalize(self, cache.close)
        blocks: list[Block] = []
        columns: list[bytes | int] = []
        at = 0
        size, now = os.fstat(cache.fileno()).st_size, os.fstat(log.fileno())
        while at + _HEAD.size <= size:
            length, crc = _HEAD.unpack(os.pread(cache.fileno(), _HEAD.size, at))
            data = os.pread(cache.fileno(), length, at + _HEAD.size)
            at += _HEAD.size + length
            try:
                block = _load_block(data) if crc == zlib.crc32(data, _VERSION) else None
            except (msgspec.MsgspecError, ValueError):
                block = None
            if block is None or not block.is_sound(blocks[-1].end if blocks else 0):
                return
            blocks.append(block)
            columns.append(at)
            at += block.rows * _ROW.itemsize
        if at != size or not blocks or (last := blocks[-1]).end > now.st_size:
            return
        if last.end == now.st_size and last.changed != now.st_mtime_ns:  # edited in place
            return
        log.seek(last.begin)
        if zlib.crc32(log.read(last.end - last.begin)) == last.crc:
            self.blocks, self._columns, self._cache = blocks, columns, cache

    def _save(self, path: Path, log: IO[bytes]) -> BinaryIO:
        """Replace the cache by one that has also what was appended to the log, and open it.

        Where the folder takes none, it is a file without a name that this process has for itself.

        Raises: OSError.
        """
        try:
            with staged_file(path) as temporary:
                with open(temporary, "wb") as file:
                    self._write(file, log)
                os.replace(temporary, path)
            return open_regular(path)
        except OSError:  # read-only, full
            unnamed = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - closed with self
            weakref.finalize(self, unnamed.close)
            self._write(unnamed, log)
            return unnamed

    def _write(self, file: BinaryIO, log: IO[bytes]) -> None:
        if self._cache is not None:
            self._cache.seek(0)
            shutil.copyfileobj(self._cache, file)
        for block, columns in decoded(log, self._end):
            data = msgspec.json.encode(block)
            file.write(_HEAD.pack(len(data), zlib.crc32(data, _VERSION)) + data + columns)
        file.flush()

    def column(self, name: str) -> np.ndarray:
        """Return one number of each step; it is read anew each time.

        Raises: GPT2LabError if the log was changed meanwhile; OSError.
        """
        number, first, end = _PLACES[name]
        values = np.empty(sum(block.rows for block in self.blocks), _TYPES[name])
        row = 0
        for block, columns in zip(self.blocks, self._columns, strict=True):
            begin, size = first * block.rows, (end - first) * block.rows
            if isinstance(columns, int):
                assert self._cache is not None
                data = os.pread(self._cache.fileno(), size, columns + begin)
            else:
                data = columns[begin : begin + size]
            if zlib.crc32(data) != block.sums[number]:  # a damaged cache
                data = decode(self._lines_of(block), block.begin, 0)[1][begin : begin + size]
            values[row : row + block.rows] = np.frombuffer(data, _TYPES[name])
            row += block.rows
        return values

    def check(self, row: int) -> None:
        """Check that the log still has the lines around a step: its block, and the next.

        Raises: GPT2LabError if it has not; OSError.
        """
        ends = list(accumulate(block.rows for block in self.blocks))
        first = bisect.bisect_right(ends, row)
        for block in self.blocks[first : first + 2]:
            self._lines_of(block)

    def _lines_of(self, block: Block) -> bytes:
        """Read the lines of a block again."""
        with open_lines(self._log) as file:
            file.seek(block.begin)
            data = file.read(block.end - block.begin)
        if len(data) == block.end - block.begin - 1:
            data += b"\n"  # of a last line, not written yet
        if zlib.crc32(data) != block.crc:
            raise self.changed()
        return data

    def changed(self) -> GPT2LabError:
        """Return the error for a log that is not what it was, and forget its cache."""
        if isinstance(self._log, Path):
            with contextlib.suppress(OSError):
                os.unlink(self._log.with_name(CACHE))
        return GPT2LabError(f"{self._log!s:.200}: changed while it was read; try again")


def open_lines(log: Path | bytes) -> IO[bytes]:
    """Open a log, or lines that are in no file, to read them.

    Raises: OSError.
    """
    return io.BytesIO(log) if isinstance(log, bytes) else open(log, "rb", opener=regular)


def decoded(log: IO[bytes], begin: int) -> Iterator[tuple[Block, bytes]]:
    """Yield the blocks of a log from a byte on, with their columns."""
    log.seek(begin)
    changed = 0 if isinstance(log, io.BytesIO) else os.fstat(log.fileno()).st_mtime_ns
    while data := log.read(BLOCK):
        data += log.readline()
        end = data.rfind(b"\n") + 1
        with contextlib.suppress(ValueError):  # a last line that is being written, or torn
            parse_line(data[end:])
            data += b"\n"  # it comes next, or when the log is opened
            end = len(data)
        data = data[:end]
        if not data:
            return
        yield decode(data, begin, changed)
        begin += len(data)


def decode(data: bytes, begin: int, changed: int) -> tuple[Block, bytes]:
    """Return the block of some whole lines, and the columns of its steps one after another."""
    rows, others, place = bytearray(), [], begin
    for number, line in enumerate(data.split(b"\n")[:-1]):
        step = decode_step(line)
        if step is None:
            with contextlib.suppress(ValueError):
                event = parse_line(line)
                step = as_step(event) if event["event"] == "step" else None
        if step is None:
            others.append((number, line))
        else:
            rows += _pack(place, *_values_of(step))
        place += len(line) + 1
    table = np.frombuffer(rows, _ROW)
    columns = [table[name].tobytes() for name in _TYPES]
    sums = [zlib.crc32(column) for column in columns]
    block = Block(begin, place, zlib.crc32(data), changed, len(table), others, sums)
    return block, b"".join(columns)
