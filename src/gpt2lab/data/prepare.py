"""Documents -> token shards and their manifest, staged beside the target and moved there by one rename."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2lab import fmt, paths
from gpt2lab.data import tokenizer
from gpt2lab.data.shards import FORMAT, MANIFEST, fingerprint_of, read_manifest, shard_name
from gpt2lab.data.sources import Source
from gpt2lab.errors import DataError
from gpt2lab.manifest import sync_folder, write_durably

VAL_FRACTION = 0.05
LARGEST_DEFAULT_VAL = 100_000_000
_BYTES_PER_TOKEN = 4  # of English; only sizes the default validation split
_BATCH_DOCUMENTS = 256
SMALLEST_LAST_SHARD = 65_536  # tokens; a smaller remainder joins the shard before


@dataclass(frozen=True)
class Result:
    """What was written."""

    folder: Path
    documents: int
    tokens: dict[str, int]
    shards: int
    num_bytes: int
    seconds: float


def check_sizes(*, shard_tokens: int, val_tokens: int | None, max_tokens: int | None) -> None:
    """Refuse sizes that cannot work, all in one message.

    Raises: DataError.
    """
    problems = []
    if shard_tokens < 2:
        problems.append(f"shard_tokens {shard_tokens} must be at least 2")
    if val_tokens is not None and val_tokens < 2:
        problems.append(f"val_tokens {val_tokens} must be at least 2")
    if max_tokens is not None and max_tokens < 4:
        problems.append(f"max_tokens {max_tokens} must be at least 4")
    if problems:
        raise DataError("; ".join(problems))


def prepare(
    source: Source,
    folder: Path,
    *,
    shard_tokens: int,
    val_tokens: int | None,
    max_tokens: int | None,
) -> Result | None:
    """Tokenise a source into `folder`; None if the same is there already.

    The first documents become the validation split, up to `val_tokens` (default: 5 % of the expected size, at most
    100M tokens); a corpus that ends before training data begins is cut 5 : 95 instead, so there are always both.

    Raises: DataError if the folder holds something else, a document cannot be read, or there is next to no text.
    """
    folder = folder.resolve()  # through a link: the shards belong on the disk that it points to
    request = {
        "content": source.identity(),
        "shard_tokens": shard_tokens,
        "val_tokens": val_tokens,
        "max_tokens": max_tokens,
    }
    if _is_done(folder, request):
        return None
    began = time.monotonic()
    staging = _stage(folder)
    try:
        writer = _ShardWriter(staging, source.dataset, shard_tokens=shard_tokens)
        documents = _write_splits(source, writer, val_tokens=val_tokens, max_tokens=max_tokens)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "dataset": source.dataset,
            "origin": source.origin,
            "request": request,
            "tokenizer": {"name": tokenizer.NAME, "sha256": tokenizer.VOCABULARY_HASH},
            "documents": documents,
            "files": writer.files,
        }
        manifest["fingerprint"] = fingerprint_of(manifest)
        write_durably(staging / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        sync_folder(staging)
        os.rename(staging, folder)
        sync_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise DataError(
            f"{folder}: cannot be written ({error.strerror}); nothing was kept"
        ) from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    tokens = {
        s: sum(f["tokens"] for f in writer.files if f["split"] == s) for s in ("train", "val")
    }
    num_bytes = sum(file["bytes"] for file in writer.files)
    return Result(folder, documents, tokens, len(writer.files), num_bytes, time.monotonic() - began)


def _stage(folder: Path) -> Path:
    """Create the folder to write to, beside the target; sweep those that killed processes left."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in folder.parent.glob(f".tmp-{folder.name}-*"):
            if not _is_alive(leftover.name.rpartition("-")[2]):
                shutil.rmtree(leftover, ignore_errors=True)
        staging = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
        staging.mkdir()
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error.strerror}); choose another --out"
        ) from error
    return staging


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def describe(result: Result) -> str:
    """Write the result as a table."""
    total = sum(result.tokens.values())
    rows = [
        ("documents", f"{result.documents:,}"),
        ("tokens", f"{total:,} ({result.tokens['train']:,} train, {result.tokens['val']:,} val)"),
        ("mean document", f"{total / result.documents:,.0f} tokens"),
        ("shards", f"{result.shards:,} files, {fmt.num_bytes(result.num_bytes)}"),
        ("time", f"{fmt.duration(result.seconds)} ({total / result.seconds:,.0f} tokens/s)"),
        ("folder", paths.for_people(result.folder)),
    ]
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _is_done(folder: Path, request: dict[str, Any]) -> bool:
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if (
        folder.is_dir()
        and (folder / MANIFEST).exists()
        and read_manifest(folder).get("request") == request
    ):
        return True
    raise DataError(
        f"{folder}: holds something else already; choose another --out, or move it away"
    )


def _write_splits(
    source: Source, writer: _ShardWriter, *, val_tokens: int | None, max_tokens: int | None
) -> int:
    """Write both splits and return the number of documents."""
    expected = None if source.num_bytes is None else source.num_bytes // _BYTES_PER_TOKEN
    if max_tokens is not None:
        expected = max_tokens if expected is None else min(expected, max_tokens)
    if val_tokens is None:
        val_tokens = LARGEST_DEFAULT_VAL
        if expected is not None:
            val_tokens = min(val_tokens, max(2, int(VAL_FRACTION * expected)))
    val, held = [np.empty(0, np.uint16)], 0  # validation tokens, until there are enough
    written = documents = 0
    with tqdm(total=expected, unit="tok", unit_scale=True, desc=source.name) as bar:
        for tokens in _encode(source.documents()):
            if max_tokens is not None:
                tokens = tokens[: max_tokens - held - written]
            documents += 1
            bar.update(len(tokens))
            if held < val_tokens:
                val.append(tokens[: val_tokens - held])
                held += len(val[-1])
                tokens = tokens[len(val[-1]) :]
            writer.add("train", tokens)
            written += len(tokens)
            if max_tokens is not None and held + written >= max_tokens:
                break
    val_part = np.concatenate(val)
    if not written:  # the corpus ended inside the validation split
        cut = max(2, int(VAL_FRACTION * held))
        writer.add("train", val_part[cut:])
        val_part = val_part[:cut]
    writer.add("val", val_part)
    try:
        writer.close()
    except DataError as error:
        raise DataError(f"{source.origin}: {error}") from None
    return documents


def _encode(documents: Iterator[str]) -> Iterator[np.ndarray]:
    """Yield each document's ids, <|endoftext|> first, in order; batches are encoded by threads."""
    encoding = tokenizer.gpt2_encoding()
    threads = os.cpu_count() or 1
    while batch := list(itertools.islice(documents, _BATCH_DOCUMENTS)):
        for ids in encoding.encode_ordinary_batch(batch, num_threads=threads):
            yield np.array([tokenizer.END_OF_TEXT, *ids], dtype=np.uint16)


class _ShardWriter:
    """Fills shards of equal size; the last of a split takes a small remainder along.

    A remainder of a few tokens in a shard of its own could hold no window, and training refuses such shards.
    """

    def __init__(self, folder: Path, dataset: str, *, shard_tokens: int) -> None:
        self.files: list[dict[str, Any]] = []
        self._folder, self._dataset, self._shard_tokens = folder, dataset, shard_tokens
        self._flush_at = shard_tokens + min(shard_tokens, SMALLEST_LAST_SHARD)
        self._pending: dict[str, list[np.ndarray]] = {"train": [], "val": []}
        self._held = {"train": 0, "val": 0}

    def add(self, split: str, tokens: np.ndarray) -> None:
        """Append tokens to a split."""
        self._pending[split].append(tokens)
        self._held[split] += len(tokens)
        if self._held[split] < self._flush_at:
            return
        held = np.concatenate(self._pending[split])
        while len(held) >= self._flush_at:
            self._write(split, held[: self._shard_tokens])
            held = held[self._shard_tokens :]
        self._pending[split], self._held[split] = [held], len(held)

    def close(self) -> None:
        """Write the last shard of each split and put the manifest's files in order.

        Raises: DataError if a split has no two tokens, hence nothing to predict.
        """
        for split, pending in self._pending.items():
            if self._held[split] < 2:
                raise DataError(
                    f"only {self._held[split]} tokens for the {split} split; too little text, or --val_tokens takes all"
                )
            self._write(split, np.concatenate(pending))
        self.files.sort(key=lambda file: (file["split"], file["name"]))

    def _write(self, split: str, tokens: np.ndarray) -> None:
        index = sum(file["split"] == split for file in self.files)
        path = self._folder / shard_name(self._dataset, split, index)
        buffer = io.BytesIO()
        np.save(buffer, tokens.astype("<u2", copy=False))
        content = buffer.getvalue()
        self.files.append(
            {
                "name": path.name,
                "split": split,
                "tokens": len(tokens),
                "bytes": len(content),
                "sha256": write_durably(path, content),
                "max_id": int(tokens.max()),
            }
        )
