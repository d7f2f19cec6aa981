"""Prepare one group of files: a folder of its shards, committed by one rename."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.prepare.encode import EncoderPool
from gpt2lab.data.prepare.groups import File, FileGroup, Share
from gpt2lab.data.prepare.readers import State, Stream, read, sha256_of_share, state_of
from gpt2lab.data.prepare.write import Divider, ShardWriter, SplitRule
from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder, write_durably
from gpt2lab.tokenizers.interface import Tokenizer

_FACTS = "group.json"
_BLOCK = 1 << 22  # tokens


class ChangedError(DataError):
    """Another process wrote to a source."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: changed while it was read; run the same command again")


@dataclass(frozen=True)
class Finished:
    """A group that is done: its folder with val.npy, its training shards, and what was counted."""

    folder: Path
    files: list[dict[str, Any]]
    facts: dict[str, Any]  # val_tokens, bad, empty, held_back, smallest, shares, states


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

    def changed_files(self, finished: Finished) -> list[str]:
        """Return the names of its files whose bytes are no longer those that were read."""
        files = (share.file for share in self.group.shares)
        return changed_files(files, finished.facts["shares"], finished.facts["states"])

    def require(self, states: Mapping[str, State]) -> None:
        """Reject files in another state than before, or of another size than when they were listed.

        Raises: ChangedError.
        """
        for share in self.group.shares:
            file, before = share.file, states[share.file.name]
            if state_of(file) != before or (before is not None and before[0] != file.size):
                raise ChangedError(file.url)


def run_task(
    task: Task, staging: Path, pool: EncoderPool, on_tokens: Callable[[int], object]
) -> Finished:
    """Read, tokenize and write a group below `staging`, unless that is done; `on_tokens` gets the tokens of each batch.

    Raises: DataError; OSError if nothing can be written.
    """
    final = staging / task.folder
    if final.is_dir():
        finished = read_finished(final)
        is_allowed = task.skip_bad or not finished.facts["bad"]
        if is_allowed and not task.changed_files(finished):
            return finished
        shutil.rmtree(final)
    # A unique name: on a cluster a task that is believed dead may still be running.
    temporary = staging / f".{task.folder}.{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        states = {share.file.name: state_of(share.file) for share in task.group.shares}
        try:
            facts = _write(task, temporary, pool, on_tokens)
            facts["shares"] = [
                [share.file.name, share.number, share.count, sha256_of_share(share)]
                for share in task.group.shares
            ]
        except DataError:  # a record cut by a change, for example
            task.require(states)
            raise
        task.require(states)
        facts["states"] = states
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


def changed_files(
    files: Iterable[File], shares: Iterable[Sequence[Any]], states: Mapping[str, Any]
) -> list[str]:
    """Return the names of files whose bytes are not those of the shares that were made of them.

    `shares`: as in shards.json; `states`: of the files by name, at the time. A file in the same state is not read.
    """
    by_name = {file.name: file for file in files}

    def is_changed(share: Sequence[Any]) -> bool:
        name, number, count, digest = share
        if (file := by_name.get(name)) is None:
            return True
        if (now := state_of(file)) is not None and states.get(name) == list(now):
            return False
        return sha256_of_share(Share(file, number, count)) != digest

    listed = list(shares)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases Python's lock
        found = zip(listed, pool.map(is_changed, listed), strict=True)
        return sorted({share[0] for share, changed in found if changed})


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
    val: list[np.ndarray] = [np.empty(0, task.tokenizer.dtype)]
    bad = empty = 0
    with (
        contextlib.closing(
            ShardWriter(folder, "train", shard_tokens=task.shard_tokens, tokenizer=task.tokenizer)
        ) as train,
        contextlib.closing(_Shuffler(folder, task, train) if task.shuffle else train) as sink,
        contextlib.closing(_documents(task)) as documents,
        contextlib.closing(pool.encode(documents, skip_bad=task.skip_bad)) as batches,
    ):
        for encoded, bad, empty in batches:  # noqa: B007 - the last ones count
            before = divider.tokens
            of_train, of_val = divider.divide(encoded)
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
        }


def _documents(task: Task) -> Stream:
    for share in task.group.shares:
        yield from read(share, text_column=task.text_column)


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
