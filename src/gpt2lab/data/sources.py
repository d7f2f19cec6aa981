"""Where documents come from: each source is a name, a rough size, and a stream of texts in a fixed order."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt2lab.errors import DataError

LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Source:
    """Documents that can be read once from the beginning."""

    name: str  # of the data folder
    dataset: str  # first part of the shards' file names
    origin: str  # recorded in shards.json; no path of this machine
    num_bytes: int | None  # of text, where it is known beforehand
    documents: Callable[[], Iterator[str]]
    identity: Callable[[], str]  # changes when the documents do: how "already prepared" is known


def open_source(source: str, *, text_column: str) -> Source:
    """Return the source that a command line names: python-stdlib, fineweb-edu, hf:NAME, or a file or folder.

    Raises: DataError if it is none of these.
    """
    if source == "python-stdlib":
        return _python_stdlib()
    if source == "fineweb-edu":
        return _hugging_face(
            "HuggingFaceFW/fineweb-edu", "sample-10BT", "fineweb_edu", "edufineweb", text_column
        )
    if source.startswith("hf:"):
        name = source[3:]
        plain = _plain(name)
        return _hugging_face(name, None, plain, plain, text_column)
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(
            f"{source}: no such file or folder, and not python-stdlib, fineweb-edu or hf:NAME"
        )
    return _local(path, text_column)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() or "corpus"


def _python_stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    # Neighbouring modules resemble each other: a fixed shuffle keeps training windows and the split mixed.
    files.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())

    def documents() -> Iterator[str]:
        for path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few of the library's own test files are broken on purpose
            yield text

    return Source(
        name="python_stdlib",
        dataset="python_stdlib",
        origin=f"standard library of Python {platform.python_version()}",
        num_bytes=sum(path.stat().st_size for path in files),
        documents=documents,
        identity=lambda: (
            "python-stdlib"
        ),  # any version will do: an upgrade of Python is no reason to refuse
    )


def _hugging_face(
    name: str, subset: str | None, folder: str, dataset: str, text_column: str
) -> Source:
    def documents() -> Iterator[str]:
        from datasets import load_dataset

        try:
            rows = load_dataset(name, name=subset, split="train", streaming=True)
            for number, row in enumerate(rows):
                yield _text_of(row, text_column, f"{name} row {number}")
        except DataError:
            raise
        except (
            Exception
        ) as error:  # the hub client raises many kinds: no network, no such dataset, no access
            raise DataError(
                f"hf:{name}: cannot be read ({type(error).__name__}: {error})".replace("\n", " ")
            ) from error

    origin = f"Hugging Face dataset {name}" + (f", {subset}" if subset else "")
    return Source(
        name=folder,
        dataset=dataset,
        origin=origin,
        num_bytes=None,
        documents=documents,
        identity=lambda: f"{origin}, column {text_column}",
    )


def _local(path: Path, text_column: str) -> Source:
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in LOCAL_SUFFIXES and not p.is_dir())
    if not files:
        raise DataError(f"{path}: no {', '.join(LOCAL_SUFFIXES)} files in this folder")
    for file in files:
        if file.suffix not in LOCAL_SUFFIXES:
            raise DataError(f"{file}: unknown kind of file; known: {', '.join(LOCAL_SUFFIXES)}")
        if not file.is_file():
            raise DataError(f"{file}: not a file (a dangling link?)")

    def documents() -> Iterator[str]:
        for file in files:
            try:
                yield from _READERS[file.suffix](file, text_column)
            except OSError as error:
                raise DataError(f"{file}: {error.strerror or error}") from error

    name = _plain(path.resolve().stem)
    root = path if path.is_dir() else path.parent
    return Source(
        name=name,
        dataset=name,
        origin=path.name,
        num_bytes=sum(file.stat().st_size for file in files),
        documents=documents,
        identity=lambda: f"{_hash_files(files, root)}, column {text_column}",
    )


def _hash_files(files: list[Path], root: Path) -> str:
    """Hash names and contents: a hundredth of the time that tokenising them takes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size}\n".encode())
        with open(file, "rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _read_txt(path: Path, text_column: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start}") from error


def _read_jsonl(path: Path, text_column: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} line {number}: not JSON ({error})") from error
            yield _text_of(row, text_column, f"{path} line {number}")


def _read_parquet(path: Path, text_column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            if text_column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{path}: no column {text_column!r}; it has {names}")
            for batch in file.iter_batches(columns=[text_column]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield _text_of({text_column: text}, text_column, f"{path} row {number}")
    except pa.ArrowException as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from error


def _text_of(row: object, text_column: str, where: str) -> str:
    if not isinstance(row, dict) or text_column not in row:
        columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{where}: no column {text_column!r} (it has {columns}); give another --text_column"
        )
    text = row[text_column]
    if not isinstance(text, str):
        raise DataError(f"{where}: column {text_column!r} holds {type(text).__name__}, not text")
    return text


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
