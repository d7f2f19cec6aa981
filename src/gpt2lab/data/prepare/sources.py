"""Sources of documents: a name, a rough size, and a stream of texts in a fixed order."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab.errors import DataError, SourceLostError

LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
PACKED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}  # of .txt and .jsonl
_BLOCK = 1 << 20
_BOOKMARK_EVERY = 1000  # rows of a Hugging Face dataset
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"


@dataclass(frozen=True)
class Document:
    """One text, read in blocks; with a bookmark, the source can resume right before it."""

    blocks: Iterable[str]
    where: str  # file and record, for people
    bookmark: Any = None  # JSON


Stream = Iterator[Document | DataError]  # an error stands in place of a record that cannot be used


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, from the beginning or from a bookmark."""

    name: str  # of the data folder
    dataset: str  # first part of the shards' file names
    origin: str  # recorded in shards.json; no path of this machine
    num_bytes: int | None  # of text, approximate; None where it is not known beforehand
    documents: Callable[[Any], Stream]
    identity: Callable[[], str]  # changes when the documents do: how "already prepared" is known


def open_source(
    source: str, *, text_column: str, subset: str | None = None, part: tuple[int, int] = (1, 1)
) -> Source:
    """Return the source that a command line names: python-stdlib, fineweb-edu, hf:NAME, or a file or folder.

    `part` (i, n), 1 <= i <= n, selects the i-th of n disjoint parts, which together hold every document.

    Raises: DataError if it is none of these.
    """
    if source == "fineweb-edu":
        chosen = subset or "sample-10BT"
        suffix = "" if chosen == "sample-10BT" else f"_{_plain(chosen.removeprefix('sample-'))}"
        config = "default" if chosen == "full" else chosen
        return _hugging_face(
            FINEWEB_EDU, config, f"fineweb_edu{suffix}", "edufineweb", text_column, part
        )
    if source.startswith("hf:"):
        plain = _plain("_".join(filter(None, (source[3:], subset))))
        return _hugging_face(source[3:], subset, plain, plain, text_column, part)
    if subset is not None:
        raise DataError(f"--subset {subset}: only fineweb-edu and hf:NAME have subsets")
    if source == "python-stdlib":
        return _python_stdlib(part)
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(
            f"{source}: no such file or folder, and not python-stdlib, fineweb-edu or hf:NAME"
        )
    return _local(path, text_column, part)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() or "corpus"


# -- the standard library --------------------------------------------------------------------------------------------


def _python_stdlib(part: tuple[int, int]) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    # Neighbouring modules resemble each other: a fixed shuffle keeps training windows and the split mixed.
    files.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())

    def read(file: Path) -> Stream:
        # A few of the library's own test files are broken on purpose: they are not documents of this corpus.
        return (found for found in _read_txt(file, "") if isinstance(found, Document))

    return Source(
        name="python_stdlib",
        dataset="python_stdlib",
        origin=f"standard library of Python {platform.python_version()}",
        num_bytes=sum(path.stat().st_size for path in files) // part[1],
        documents=lambda bookmark: _read_files(files, read, bookmark, part),
        identity=lambda: "python-stdlib",  # an upgrade of Python does not make it another source
    )


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def _hugging_face(
    name: str,
    subset: str | None,
    folder: str,
    dataset: str,
    text_column: str,
    part: tuple[int, int],
) -> Source:
    def documents(bookmark: Any) -> Stream:
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node

        begun = False
        try:
            rows = load_dataset(name, name=subset, split="train", streaming=True)
            if part[1] > 1:  # full files where they divide evenly, else every n-th row
                rows = split_dataset_by_node(rows, rank=part[0] - 1, world_size=part[1])
            number, mark = 0, bookmark
            if bookmark is not None:
                number = bookmark["row"]
                rows.load_state_dict(bookmark["state"])
            for row in rows:
                begun = True
                yield _document(row, text_column, f"{name} row {number}", mark)
                number, mark = number + 1, None
                if number % _BOOKMARK_EVERY == 0:
                    mark = {"row": number, "state": rows.state_dict()}
        except Exception as error:  # of many kinds: no network, no such dataset, no access
            message = f"hf:{name}: cannot be read ({type(error).__name__}: {error})"
            kind = SourceLostError if begun else DataError
            raise kind(" ".join(message.split())) from error

    origin = f"Hugging Face dataset {name}" + (f", {subset}" if subset else "")
    return Source(
        name=folder,
        dataset=dataset,
        origin=origin,
        num_bytes=None,
        documents=documents,
        identity=lambda: f"{origin}, column {text_column}",
    )


# -- files -----------------------------------------------------------------------------------------------------------


def _local(path: Path, text_column: str, part: tuple[int, int]) -> Source:
    known = f"{', '.join(LOCAL_SUFFIXES)}, the first two also as {' or '.join(PACKED_SUFFIXES)}"
    files = _files_below(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no {known} files in this folder")
    for file in files:
        if not _kind_of(file):
            raise DataError(f"{file}: unknown kind of file; known: {known}")
        if not file.is_file():
            raise DataError(f"{file}: not a file (a dangling link?)")
    name = _plain(path.resolve().name.split(".")[0])
    root = path if path.is_dir() else path.parent
    return Source(
        name=name,
        dataset=name,
        origin=path.name,
        num_bytes=sum(file.stat().st_size for file in files) // part[1],
        documents=lambda bookmark: _read_files(
            files, lambda file: _READERS[_kind_of(file)](file, text_column), bookmark, part
        ),
        identity=lambda: f"{_hash_files(files, root)}, column {text_column}",
    )


def _files_below(folder: Path) -> list[Path]:
    """Return the files of known kinds in a folder and its subfolders, also behind links, each folder once.

    Raises: DataError if a folder cannot be listed: without its texts the corpus would be another.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from error

    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        facts = os.stat(here)
        if (facts.st_dev, facts.st_ino) in seen:  # a link back, or a second one
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        folders.sort()
        found += [path for name in names if _kind_of(path := Path(here, name))]
    return sorted(found)


def _kind_of(path: Path) -> str:
    """Return the suffix that tells how to read a file, or the empty string."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in (".txt", ".jsonl") else ""
    return suffixes[-1] if suffixes and suffixes[-1] in LOCAL_SUFFIXES else ""


def _hash_files(files: list[Path], root: Path) -> str:
    """Hash names and contents; this takes a hundredth of the time of tokenising them."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size}\n".encode())
        with open(file, "rb") as content:
            while block := content.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _read_files(
    files: list[Path],
    read: Callable[[Path], Stream],
    bookmark: Any,
    part: tuple[int, int],
) -> Stream:
    """Yield the records of the files that belong to the part; each file begins with a bookmark."""
    number = bookmark["records"] if bookmark else 0
    for index in range(bookmark["file"] if bookmark else 0, len(files)):
        mark: Any = {"file": index, "records": number}
        for document in read(files[index]):
            number += 1
            if (number - part[0]) % part[1]:
                continue
            if isinstance(document, Document) and mark is not None:
                document, mark = Document(document.blocks, document.where, mark), None
            yield document


def _open(path: Path) -> io.BufferedReader:
    """Open a file for reading, decompressed as its name says."""
    if path.suffix.lower() not in PACKED_SUFFIXES:
        return open(path, "rb")
    import pyarrow as pa

    codec = PACKED_SUFFIXES[path.suffix.lower()]
    return io.BufferedReader(pa.input_stream(str(path), compression=codec), _BLOCK)


def _read_txt(path: Path, text_column: str) -> Stream:
    try:
        bad = _first_bad_byte(path)
    except OSError as error:
        yield DataError(f"{path}: {error.strerror or error}")
        return
    if bad is not None:
        yield DataError(f"{path}: not UTF-8 text at byte {bad}")
    else:
        yield Document(_blocks_of(path), str(path))


def _blocks_of(path: Path) -> Iterator[str]:
    with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
        while block := file.read(_BLOCK):
            yield block


def _first_bad_byte(path: Path) -> int | None:
    """Return the offset of the first byte that is not UTF-8, None if there is none."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with _open(path) as file:
        while True:
            block = file.read(_BLOCK)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return position - held + error.start
            if not block:
                return None
            position += len(block)


def _read_jsonl(path: Path, text_column: str) -> Stream:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield DataError(f"{path} line {number}: not JSON ({error})")
                    continue
                yield _document(row, text_column, f"{path} line {number}")
    except OSError as error:
        yield DataError(f"{path}: not readable after line {number} ({error.strerror or error})")


def _read_parquet(path: Path, text_column: str) -> Stream:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            if text_column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                yield DataError(f"{path}: no column {text_column!r}; it has {names}")
                return
            for batch in file.iter_batches(batch_size=1024, columns=[text_column]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield _document({text_column: text}, text_column, f"{path} row {number}")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield DataError(f"{path}: not readable as Parquet after row {number} ({error})")


def _document(
    row: object, text_column: str, where: str, bookmark: Any = None
) -> Document | DataError:
    if not isinstance(row, dict) or text_column not in row:
        columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        return DataError(
            f"{where}: no column {text_column!r} (it has {columns}); give another --text_column"
        )
    text = row[text_column]
    if not isinstance(text, str):
        return DataError(f"{where}: column {text_column!r} holds {type(text).__name__}, not text")
    return Document((text,), where, bookmark)


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
