"""Prepare one group of files: a folder of its shards, committed by one rename."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.prepare.encode import EncoderPool
from gpt2lab.data.prepare.groups import FileGroup
from gpt2lab.data.prepare.readers import Stream, digest_of, read
from gpt2lab.data.prepare.write import Divider, ShardWriter, SplitRule
from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder, write_durably
from gpt2lab.tokenizers.interface import Tokenizer

_FACTS = "group.json"
_BLOCK = 1 << 22  # tokens


@dataclass(frozen=True)
class Task:
    """What the shards of a group depend on, and its files."""

    group: FileGroup
    text_column: str
    shard_tokens: int
    rule: SplitRule
    budget: int | None  # tokens
    skip_bad: bool
    shuffle: bool
    tokenizer: Tokenizer

    @property
    def folder(self) -> str:
        """Name the folder that a finished group has."""
        return f"group_{self.group.number:05d}"


@dataclass(frozen=True)
class Finished:
    """A group that is done: its folder, its training shards, and what was counted."""

    folder: Path
    files: list[dict[str, Any]]
    facts: dict[str, Any]  # val_tokens, bad, empty, held_back, smallest, shares

    def val(self) -> np.ndarray:
        """Return the ids of the validation split, (n,) of the tokenizer's type."""
        ids: np.ndarray = np.load(self.folder / "val.npy", allow_pickle=False)
        return ids


def run_task(
    task: Task, staging: Path, pool: EncoderPool, on_tokens: Callable[[int], object]
) -> Finished:
    """Read, tokenize and write a group below `staging`, unless that is done; `on_tokens` gets the tokens of each batch.

    Raises: DataError; OSError if nothing can be written.
    """
    final = staging / task.folder
    if final.is_dir():
        if _is_current(task, final):
            return read_finished(final)
        shutil.rmtree(final)
    # A unique name: on a cluster a task that is believed dead may still be running.
    temporary = staging / f".{task.folder}.{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        facts = _write(task, temporary, pool, on_tokens)
        write_durably(temporary / _FACTS, (json.dumps(facts) + "\n").encode())
        sync_folder(temporary)
        faultpoint("data.before_group", task.group.number)
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.is_dir():  # else another worker wrote the same bytes first
                raise
        sync_folder(staging)
        faultpoint("data.after_group", task.group.number)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return read_finished(final)


def _is_current(task: Task, folder: Path) -> bool:
    """Tell whether a group that is done has the text that its files have now; only newer files are read."""
    finished = read_finished(folder)
    made = (folder / _FACTS).stat().st_mtime
    for share, (*_, digest) in zip(task.group.shares, finished.facts["shares"], strict=True):
        file = share.file.url
        if "://" in file or os.stat(file).st_mtime < made:
            continue
        if digest is None or digest_of(share, text_column=task.text_column) != digest:
            return False
    return True


def read_finished(folder: Path) -> Finished:
    """Return a group that is done.

    Raises: DataError if its record cannot be read.
    """
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
        return Finished(folder, facts.pop("files"), facts)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder}: not readable ({error}); delete it, to prepare it again"
        ) from error


def _write(
    task: Task, folder: Path, pool: EncoderPool, on_tokens: Callable[[int], object]
) -> dict[str, Any]:
    divider = Divider(task.rule, budget=task.budget)
    digests: list[str] = []  # of the shares that were read to their end
    val: list[np.ndarray] = [np.empty(0, task.tokenizer.dtype)]
    bad = empty = 0
    with (
        contextlib.closing(
            ShardWriter(
                folder,
                "train",
                shard_tokens=task.shard_tokens,
                name_of=_train_name,
                tokenizer=task.tokenizer,
            )
        ) as train,
        contextlib.closing(_Shuffler(folder, task, train) if task.shuffle else train) as sink,
        contextlib.closing(_documents(task, digests)) as documents,
        contextlib.closing(pool.encode(documents, skip_bad=task.skip_bad)) as batches,
    ):
        for batch in batches:
            bad, empty, before = batch.bad, batch.empty, divider.tokens
            of_train, of_val = divider.divide(batch.encoded)
            sink.add(of_train)
            val.append(of_val)
            on_tokens(divider.tokens - before)
            if divider.is_full:
                break
        sink.finish()
        if sink is not train:
            train.finish()
        ids = np.concatenate(val)
        np.save(folder / "val.npy", ids)
        return {
            "number": task.group.number,
            "files": train.files,
            "val_tokens": len(ids),
            "train_tokens": train.tokens,
            "bad": bad,
            "empty": empty,
            "held_back": divider.held_back,
            "smallest": divider.smallest(),
            "shares": [
                [share.file.name, share.number, share.count, digest]
                for share, digest in itertools.zip_longest(task.group.shares, digests)
            ],
        }


def _train_name(number: int) -> str:
    return f"train_{number:06d}.npy"


def _documents(task: Task, digests: list[str]) -> Stream:
    for share in task.group.shares:
        digest = hashlib.sha256()
        yield from read(share, text_column=task.text_column, digest=digest)
        digests.append(digest.hexdigest())


class _Shuffler:
    """Collects a group's ids on the disk and passes them on document by document in another order."""

    def __init__(self, folder: Path, task: Task, sink: ShardWriter) -> None:
        self._path = folder / "shuffle.tmp"
        self._file = open(self._path, "wb")  # noqa: SIM115 - closed in finish() or close()
        self._number, self._tokenizer, self._sink = task.group.number, task.tokenizer, sink

    def add(self, ids: np.ndarray) -> None:
        self._file.write(ids.tobytes())

    def finish(self) -> None:
        self._file.close()
        if self._path.stat().st_size == 0:
            return
        ids = np.memmap(self._path, self._tokenizer.dtype, "r")
        end, blocks = self._tokenizer.end_of_text, range(0, len(ids), _BLOCK)
        starts = np.concatenate([a + np.flatnonzero(ids[a : a + _BLOCK] == end) for a in blocks])
        ends = np.append(starts[1:], len(ids))
        for place in np.random.RandomState(self._number).permutation(len(starts)).tolist():
            self._sink.add(np.asarray(ids[starts[place] : ends[place]]))

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def drop_unfinished(staging: Path) -> None:
    """Delete what killed tasks left; call it only while no task runs."""
    for path in staging.glob(".group_*"):
        shutil.rmtree(path, ignore_errors=True)
