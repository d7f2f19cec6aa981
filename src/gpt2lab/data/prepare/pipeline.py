"""A source -> a folder of token shards and their manifest; an interrupted preparation resumes.

Shards are collected in OUT.partial, with a journal of the place in the source; the last act is one rename to OUT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2lab import fmt, paths
from gpt2lab.data.prepare.encode import Batch, Place, encode
from gpt2lab.data.prepare.sources import Source
from gpt2lab.data.prepare.write import ShardWriter, Unfinished
from gpt2lab.data.shards import FORMAT, MANIFEST, read_manifest
from gpt2lab.errors import DataError, SourceLostError
from gpt2lab.tokenizers import gpt2

VAL_FRACTION = 0.05
LARGEST_DEFAULT_VAL = 100_000_000
_BYTES_PER_TOKEN = 4  # of English; only sizes the default validation split and the progress bar
_WORTH_WORKERS = 4_000_000  # bytes of text; below, starting workers takes longer than the work


@dataclass(frozen=True)
class Sizes:
    """Tokens in a shard, in the validation split and in all; of the full data set, also where one part is prepared."""

    shard_tokens: int = 100_000_000
    val_tokens: int | None = None  # default 5 % of the expected size, at most 100M
    max_tokens: int | None = None

    def check(self) -> None:
        """Check that the sizes can work.

        Raises: DataError with all problems in one message.
        """
        problems = [
            f"{name} {value} must be at least {least}"
            for name, least in (("shard_tokens", 2), ("val_tokens", 2), ("max_tokens", 4))
            if (value := getattr(self, name)) is not None and value < least
        ]
        if problems:
            raise DataError("; ".join(problems))

    def of_part(self, part: tuple[int, int]) -> Sizes:
        """Return the share of part i of n; the shares sum to the full sizes."""

        def share(tokens: int | None) -> int | None:
            return None if tokens is None else tokens // part[1] + (part[0] <= tokens % part[1])

        return dataclasses.replace(
            self, val_tokens=share(self.val_tokens), max_tokens=share(self.max_tokens)
        )


@dataclass(frozen=True)
class Result:
    """What was written; `seconds` and `new_tokens` count this start alone."""

    folder: Path
    files: tuple[dict[str, Any], ...]
    bad: int
    empty: int
    new_tokens: int
    seconds: float

    def total(self, fact: str, split: str | None = None) -> int:
        """Sum tokens, bytes, documents or text_bytes over the files, of all or of one split."""
        return sum(file[fact] for file in self.files if split in (None, file["split"]))


def describe(result: Result) -> str:
    """Write the result as a table."""
    tokens, documents = result.total("tokens"), result.total("documents")
    train, val = result.total("tokens", "train"), result.total("tokens", "val")
    text, speed = result.total("text_bytes"), result.new_tokens / result.seconds
    rows = [
        ("documents", f"{documents:,}"),
        ("tokens", f"{tokens:,} ({train:,} train, {val:,} val)"),
        ("text", f"{fmt.num_bytes(text)} ({text / tokens:.2f} bytes a token)"),
        ("mean document", f"{tokens / documents:,.0f} tokens"),
        ("shards", f"{len(result.files):,} files, {fmt.num_bytes(result.total('bytes'))}"),
        ("time", f"{fmt.duration(result.seconds)} ({speed:,.0f} tokens/s)"),
        ("folder", paths.for_people(result.folder)),
    ]
    if result.bad or result.empty:
        left_out = f"{result.bad:,} bad records, {result.empty:,} empty documents"
        rows.insert(1, ("left out", left_out))
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def prepare(
    source: Source,
    folder: Path,
    sizes: Sizes,
    *,
    num_workers: int | None = None,
    part: tuple[int, int] = (1, 1),
    skip_bad: bool = False,
) -> Result | None:
    """Tokenise a source into `folder`; return None if the same data is there already.

    The first `val_tokens` tokens become the validation split; a corpus that ends before training data begins is
    divided 5 : 95 instead, so both splits always exist. The shards depend neither on `num_workers` (default: one per
    core) nor on interruptions.

    Raises: DataError if the folder holds something else, a record cannot be read, or there is next to no text.
    """
    sizes.check()
    folder = folder.resolve()  # the shards belong on the disk that a link points to
    request = {"content": source.identity(), "part": list(part), **dataclasses.asdict(sizes)}
    if _is_done(folder, request):
        return None
    began = time.monotonic()
    work = Unfinished(folder, request)
    try:
        writer = ShardWriter(
            work.folder, source.dataset, shard_tokens=sizes.shard_tokens, files=work.files
        )
        done = sum(file["tokens"] for file in work.files)
        last = _write_splits(
            source,
            writer,
            work,
            sizes=sizes.of_part(part),
            num_workers=num_workers or _default_workers(source),
            skip_bad=skip_bad,
        )
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "dataset": source.dataset,
            "origin": source.origin,
            "request": request,
            "tokenizer": {"name": gpt2.NAME, "sha256": gpt2.VOCABULARY_HASH},
            "documents": sum(file["documents"] for file in writer.files),
            "left_out": {"bad": last.bad, "empty": last.empty},
            "files": sorted(writer.files, key=lambda file: (file["split"], file["name"])),
        }
        work.complete(manifest)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error.strerror}); {work.leave()}"
        ) from error
    except DataError as error:
        if work.is_worth_keeping or isinstance(error, SourceLostError):
            raise type(error)(f"{error}; {work.leave()}") from error
        raise
    finally:
        work.leave()
    tokens = sum(file["tokens"] for file in writer.files)
    return Result(
        folder=folder,
        files=tuple(writer.files),
        bad=last.bad,
        empty=last.empty,
        new_tokens=tokens - done,
        seconds=time.monotonic() - began,
    )


def _default_workers(source: Source) -> int:
    if source.num_bytes is not None and source.num_bytes < _WORTH_WORKERS:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_done(folder: Path, request: dict[str, Any]) -> bool:
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if (folder / MANIFEST).exists() and read_manifest(folder).get("request") == request:
        return True
    raise DataError(
        f"{folder}: holds something else already; choose another --out, or move it away"
    )


def _write_splits(
    source: Source,
    writer: ShardWriter,
    work: Unfinished,
    *,
    sizes: Sizes,
    num_workers: int,
    skip_bad: bool,
) -> Batch:
    """Write both splits; return the last batch that was used."""
    size = None if source.num_bytes is None else source.num_bytes // _BYTES_PER_TOKEN
    expected = min((n for n in (size, sizes.max_tokens) if n is not None), default=None)
    val_tokens = sizes.val_tokens
    if val_tokens is None:
        share = LARGEST_DEFAULT_VAL if expected is None else max(2, int(VAL_FRACTION * expected))
        val_tokens = min(LARGEST_DEFAULT_VAL, share)
    finished = sum(file["tokens"] for file in work.files)
    position, drop = finished, work.drop  # of the next id that is not in a finished shard
    noted = len(writer.files)
    restarts: deque[tuple[int, Place]] = deque()  # begins of batches since the last finished shard
    last = Batch(np.empty(0, np.uint16), work.place, work.place.bad, work.place.empty)
    with (
        contextlib.closing(writer),
        tqdm(
            total=expected, initial=finished, unit="tok", unit_scale=True, desc=source.name
        ) as bar,
        contextlib.closing(
            encode(source, start=work.place, num_workers=num_workers, skip_bad=skip_bad)
        ) as batches,
    ):
        for last in batches:
            restarts.append((position - drop, last.place))
            ids, drop = last.ids[drop:], max(0, drop - len(last.ids))
            if sizes.max_tokens is not None:
                ids = ids[: sizes.max_tokens - position]
            bar.update(len(ids))
            left = max(0, val_tokens - position)  # the stream begins with the validation split
            for split, run in (("val", ids[:left]), ("train", ids[left:])):
                if len(run):
                    writer.add(split, run)
                    position += len(run)
                    if position == val_tokens:
                        writer.finish("val")
            if len(writer.files) > noted:
                noted = len(writer.files)
                finished = sum(file["tokens"] for file in writer.files)
                while len(restarts) > 1 and restarts[1][0] <= finished:
                    restarts.popleft()
                work.note(restarts[0][1], finished - restarts[0][0])
            if sizes.max_tokens is not None and position >= sizes.max_tokens:
                break
        if position == 0:
            raise DataError(f"{source.origin}: not a single document with text in it")
        try:
            if position < val_tokens:
                writer.finish("val")
            if position <= val_tokens:
                _divide_again(writer, work)
            writer.finish("train")
        except DataError as error:
            raise DataError(f"{source.origin}: {error}") from None
    return last


def _divide_again(writer: ShardWriter, work: Unfinished) -> None:
    """Divide a text 5 : 95 that ended within the validation split."""
    held = sum(file["tokens"] for file in writer.files)
    if held > LARGEST_DEFAULT_VAL:
        raise DataError(f"{held:,} tokens in all, --val_tokens takes them; give a smaller number")
    ids = np.concatenate([np.load(work.folder / file["name"]) for file in writer.files])
    writer.files.clear()
    work.note(Place(), 0)  # an interruption after this restarts from the beginning
    cut = max(2, int(VAL_FRACTION * held))
    writer.add("val", ids[:cut])
    writer.finish("val")
    writer.add("train", ids[cut:])
