"""Read documents from files in a fixed order, in little memory; an unusable record yields an error in its place."""

import codecs
import contextlib
import csv
import errno
import functools
import hashlib
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from gpt2lab.data.prepare.groups import File, Share
from gpt2lab.errors import DataError, is_out_of_memory

_BLOCK = 1 << 20
_PACKED_BLOCK = 1 << 16  # bytes lost before the damage of an archive
_WHOLE_TEXT = 16  # blocks of a text that is held in memory
_NOT_TEXT = "{}: not UTF-8 text at byte {}; convert it with iconv -f UTF-16 (or LATIN1) -t UTF-8"
_LONGEST_RECORD = 1 << 28  # bytes of a line, or characters of a field
_ESCAPES = re.compile("[\udc80-\udcff]")  # of bytes that are not UTF-8
_PARQUET_BATCH_BYTES = 16_000_000  # of text that is decoded at once


@dataclass(frozen=True)
class Document:
    """One text, read in blocks."""

    blocks: Iterable[str]
    where: str  # file and record, for messages


class SourceLostError(DataError):
    """A source of text failed midway (mostly the network); what was prepared so far is kept."""


class BadRecordsError(DataError):
    """Records of a source that cannot be used."""

    def __init__(self, message: str, records: int = 1) -> None:
        super().__init__(message)
        self.records = records


Stream = Generator["Document | BadRecordsError", None, None]
State = tuple[int, ...] | None


def state_of(file: File) -> State:
    """Return what every change of a file changes: its bytes, times and inode.

    None of a file that is gone, and of a hub's, which its revision pins.
    """
    try:
        facts = None if "://" in file.url else os.stat(file.url)
    except OSError:
        return None
    return facts and (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def sha256_of_share(share: Share) -> str | None:
    """Hash the stored bytes that a share may read; None where the file cannot be read, or is a hub's.

    Of lines those from the byte before the share to the end of the line that its last byte is in; of Parquet all.
    """
    file, n = share.file, share.number
    if (state := state_of(file)) is None:
        return None
    first, end = 0, file.size
    if file.kind == "jsonl":
        first, end = max(0, file.size * n // share.count - 1), file.size * (n + 1) // share.count
    return _sha256_of(file.url, first, end, state)


@functools.lru_cache(maxsize=64)
def _sha256_of(path: str, place: int, end: int, state: tuple[int, ...]) -> str | None:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            file.seek(place)
            while block := file.read(min(_BLOCK, end - place)):
                place += len(block)
                digest.update(block)
            while end < state[0] and (block := file.readline(_BLOCK)):
                digest.update(block)
                if block.endswith(b"\n"):
                    break
    except OSError:
        return None
    return digest.hexdigest()


def read(share: Share, *, text_column: str) -> Stream:
    """Yield the documents of a share.

    Raises: DataError; SourceLostError if a hub can no longer be read.
    """
    try:
        yield from _READERS[share.file.kind](share, text_column)
    except DataError:
        raise
    except Exception as error:
        if _is_of_machine(error):
            raise
        if _is_remote(share):  # whatever its type, it is not a record that may be skipped
            raise _lost(share, error) from error
        if not isinstance(error, OSError):
            raise
        yield BadRecordsError(f"{share.file.url}: {error.strerror or error}")


def _lost(share: Share, error: Exception) -> SourceLostError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return SourceLostError(f"{share.file.url}: can no longer be read ({reason})")


def _is_remote(share: Share) -> bool:
    return "://" in share.file.url


def _is_of_machine(error: BaseException | None) -> bool:
    """Tell whether this machine is short of memory, threads or open files, which makes no record a bad one."""
    is_full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return is_full or is_out_of_memory(error)


def _damage(share: Share) -> tuple[type[Exception], ...]:
    """Return the errors that mean a damaged file, none if the current one does not; a hub's OSError never does."""
    import pyarrow as pa

    if _is_of_machine(sys.exc_info()[1]):
        return ()
    return (pa.ArrowException,) if _is_remote(share) else (pa.ArrowException, OSError)


def _open_raw(share: Share) -> IO[bytes]:
    if not _is_remote(share):
        return open(share.file.url, "rb")
    import fsspec

    found: IO[bytes] = fsspec.open(share.file.url, "rb").open()
    return found


def _decompress(raw: IO[bytes], share: Share) -> IO[bytes]:
    if share.file.packing is None:
        # A hub's file cannot limit the length of a line.
        return io.BufferedReader(raw, _BLOCK) if _is_remote(share) else raw  # type: ignore[type-var]
    import pyarrow as pa

    stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), share.file.packing)
    return io.BufferedReader(stream, _PACKED_BLOCK)


@contextlib.contextmanager
def _open(share: Share) -> Iterator[IO[bytes]]:
    with _open_raw(share) as raw, _decompress(raw, share) as content:
        yield content


def _read_text(share: Share, text_column: str) -> Stream:
    """Yield the whole file as one document, unchanged except for a byte order mark.

    A long file is read twice: nothing of a file may be used that is not UTF-8 to its end.
    """
    blocks, is_long = _blocks_of(share), False
    try:
        held = tuple(itertools.islice(blocks, _WHOLE_TEXT))
        for _ in blocks:
            is_long = True
    except BadRecordsError as error:
        yield error
        return
    yield Document(_blocks_again(share) if is_long else held, share.file.url)


def _blocks_of(share: Share) -> Iterator[str]:
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with _open(share) as file:
        while True:
            block = file.read(_BLOCK)
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                bad = position - held + error.start
                raise BadRecordsError(_NOT_TEXT.format(share.file.url, bad)) from error
            if not block:
                return
            yield text if position else text.removeprefix("\ufeff")
            position += len(block)


def _blocks_again(share: Share) -> Iterator[str]:
    try:
        yield from _blocks_of(share)
    except (OSError, BadRecordsError) as error:  # the first reading succeeded
        if _is_remote(share):
            raise _lost(share, error) from error
        raise DataError(
            f"{share.file.url}: changed while it was read ({error}); run the same command again"
        ) from error


def _read_jsonl(share: Share, text_column: str) -> Stream:
    name, number = share.file.url, 0
    try:
        with _open(share) as file:
            # A line belongs to the share in which it begins.
            begin, end = (
                share.file.size * n // share.count for n in (share.number, share.number + 1)
            )
            position = begin
            if begin:
                file.seek(begin - 1)
                position = begin - 1 + len(file.readline())
            if share.count == 1:
                end = sys.maxsize
            while position < end and (line := file.readline(_LONGEST_RECORD)):
                number += 1
                where = f"{name} line {number}" if begin == 0 else f"{name} byte {position}"
                position += len(line)
                if len(line) == _LONGEST_RECORD and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_LONGEST_RECORD)
                        position += len(line)
                    yield BadRecordsError(f"{where}: longer than {_LONGEST_RECORD:,} bytes")
                    continue
                if line.strip():
                    yield _document_in(line, text_column, where)
    except _damage(share) as error:
        reason = getattr(error, "strerror", None) or error
        yield BadRecordsError(f"{name}: not readable after line {number} ({reason})")


def _document_in(line: bytes, text_column: str, where: str) -> Document | BadRecordsError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRecordsError(f"{where}: not JSON ({error})")
    return document_of(row, text_column, where)


def _as_text(raw: IO[bytes]) -> IO[str]:
    csv.field_size_limit(_LONGEST_RECORD)
    # A byte that is not UTF-8 becomes half of a surrogate pair, and only its row is rejected.
    return io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="")


def _read_csv(share: Share, text_column: str) -> Stream:
    """Yield the rows of a file whose first row names the columns."""
    name, number = share.file.url, 1
    try:
        with _open(share) as raw, _as_text(raw) as file:
            rows = csv.DictReader(file, strict=True)
            if (rows.fieldnames or ()).count(text_column) > 1:
                yield BadRecordsError(f"{name}: two columns {text_column}; rename one of them")
                return
            commas: int | None = None  # at the end of each row, as some programs write
            for number, row in enumerate(rows, start=2):
                document = document_of(row, text_column, f"{name} row {number}")
                beyond = row.get(None, [])  # DictReader's key of fields beyond the names
                is_other = any(beyond) or commas not in (None, len(beyond))
                # A row with fewer is whole, unless it lacks fields, and those before it were in doubt.
                if not any(beyond) and None not in row.values():
                    commas = len(beyond) if commas is None else min(commas, len(beyond))
                if is_other:
                    problem = "more fields than the first row has names, or than other rows; quote fields with commas"
                    document = BadRecordsError(f"{name} row {number}: {problem}")
                if isinstance(document, Document) and _ESCAPES.search(row[text_column]):
                    document = BadRecordsError(f"{document.where}: not UTF-8")
                yield document
    except (csv.Error, *_damage(share)) as error:  # type: ignore[misc]
        yield BadRecordsError(f"{name}: not readable after row {number} ({error})")


def _read_parquet(share: Share, text_column: str) -> Stream:
    """Yield values one by one; damage loses its row, or at most the rest of its row group.

    Memory is about twice the largest page: the page, and as much for what is decoded. A page has up to 1,024 values.
    """
    import pyarrow.parquet as pq

    name = share.file.url
    try:
        opened = contextlib.ExitStack()
        file = opened.enter_context(
            pq.ParquetFile(
                opened.enter_context(_open_raw(share)),
                pre_buffer=False,
                buffer_size=_PARQUET_BATCH_BYTES,
            )
        )
    except _damage(share) as error:
        opened.close()
        yield BadRecordsError(f"{name}: not readable as Parquet ({error})")
        return
    with opened:
        if text_column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            yield BadRecordsError(f"{name}: no column {text_column!r}; it has {names}")
            return
        if file.schema_arrow.names.count(text_column) > 1:
            yield BadRecordsError(f"{name}: two columns {text_column}; rename one of them")
            return
        if not _is_text(file.schema_arrow.field(text_column).type):
            kind = file.schema_arrow.field(text_column).type
            yield BadRecordsError(f"{name}: column {text_column!r} holds {kind}, not text")
            return
        groups = range(
            file.num_row_groups * share.number // share.count,
            file.num_row_groups * (share.number + 1) // share.count,
        )
        first = sum(file.metadata.row_group(g).num_rows for g in range(groups.start))
        for group in groups:
            rows = file.metadata.row_group(group).num_rows
            yield from _read_row_group(file, group, share, text_column, first)
            first += rows


def _is_text(kind: Any) -> bool:
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        kind = kind.value_type
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))


def _read_row_group(file: Any, group: int, share: Share, text_column: str, first: int) -> Stream:
    import pyarrow as pa

    name, facts = share.file.url, file.metadata.row_group(group)
    rows, done = facts.num_rows, 0
    each = max(1, facts.total_byte_size // max(1, rows))
    size = max(1, min(1024, _PARQUET_BATCH_BYTES // each))
    try:
        for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=[text_column]):
            # As bytes: decoding a batch would fail because of one value that is not UTF-8.
            for value in batch.column(0).cast(pa.large_binary()):
                done += 1
                where = f"{name} row {first + done}"
                content = value.as_py()
                if content is None:
                    yield BadRecordsError(
                        f"{where}: column {text_column!r} holds NoneType, not text"
                    )
                    continue
                try:
                    text = content.decode()
                except UnicodeDecodeError as error:
                    yield BadRecordsError(f"{where}: not UTF-8 ({error.reason})")
                    continue
                yield Document((text,), where)
    except _damage(share) as error:
        lost = f"{rows - done:,} rows lost" if rows > done else "at its end"
        yield BadRecordsError(
            f"{name} row {first + done + 1}: row group {group} not readable, {lost} ({error})",
            max(1, rows - done),
        )


def document_of(row: object, text_column: str, where: str) -> Document | BadRecordsError:
    """Return the text of a record, or why it has none."""
    if not isinstance(row, dict) or text_column not in row:
        columns = type(row).__name__
        if isinstance(row, dict):
            columns = ", ".join(map(str, itertools.islice(row, 20)))
        return BadRecordsError(
            f"{where}: no column {text_column!r} (it has {columns}); give another --text_column"
        )
    text = row[text_column]
    if not isinstance(text, str):
        return BadRecordsError(
            f"{where}: column {text_column!r} holds {type(text).__name__}, not text"
        )
    return Document((text,), where)


_READERS: dict[str, Callable[[Share, str], Stream]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
}


def text_per_byte(file: File, text_column: str) -> float:
    """Return how many bytes of text a stored byte of a file holds, estimated from its beginning or its footer.

    Raises: SourceLostError if a hub cannot be read.
    """
    share = Share(file)
    try:
        if file.kind == "parquet":
            return _text_per_byte_of_parquet(share, text_column)
        if file.kind == "csv":
            return _text_per_byte_of_csv(share, text_column)
        with _open_raw(share) as raw, _decompress(raw, share) as content:
            sample = content.read(_BLOCK)
            if file.kind == "jsonl" and len(sample) == _BLOCK and b"\n" not in sample:
                sample += content.readline(_LONGEST_RECORD) + b"\n"
            stored = raw.tell()
    except _damage(share):
        return 1.0
    except Exception as error:
        if _is_remote(share):
            raise _lost(share, error) from error
        raise
    read = len(sample)
    if file.kind == "jsonl":
        lines = sample[: sample.rfind(b"\n") + 1].splitlines(keepends=True)
        documents = (_document_in(line, text_column, "") for line in lines)
        if text := sum(map(_text_bytes, documents)):  # else nothing can be read
            return text / sum(map(len, lines)) * read / max(1, stored)
    return read / stored if read else 1.0


def _text_bytes(document: Document | BadRecordsError) -> int:
    if isinstance(document, BadRecordsError):
        return 0
    return sum(len(block.encode("utf-8", "replace")) for block in document.blocks)


def _text_per_byte_of_csv(share: Share, text_column: str) -> float:
    read = text = 0

    def counted(lines: Iterable[str]) -> Iterator[str]:
        nonlocal read
        for line in lines:
            read += len(line.encode("utf-8", "surrogateescape"))
            yield line

    with _open_raw(share) as raw, _decompress(raw, share) as content, _as_text(content) as file:
        with contextlib.suppress(csv.Error):  # the preparation says what is wrong
            for row in csv.DictReader(counted(file), strict=True):
                text += _text_bytes(document_of(row, text_column, ""))
                if read >= _BLOCK:
                    break
        stored = raw.tell() if share.file.packing else read
    return text / stored if text else 1.0


def row_groups(file: File) -> int | None:
    """Count the row groups of a Parquet file of this machine; None if it cannot be read."""
    import pyarrow.parquet as pq

    try:
        with _open_raw(Share(file)) as raw, pq.ParquetFile(raw) as opened:
            return int(opened.num_row_groups)
    except _damage(Share(file)):
        return None


def _text_per_byte_of_parquet(share: Share, text_column: str) -> float:
    import pyarrow.parquet as pq

    with _open_raw(share) as raw, pq.ParquetFile(raw) as file:
        columns = [
            facts.column(number)
            for facts in map(file.metadata.row_group, range(file.num_row_groups))
            for number in range(facts.num_columns)
        ]
    held = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_column)
    return held / max(1, share.file.size)
