"""Ids -> shard files of equal size, collected in OUT.partial with a journal, so that a killed start can go on."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from gpt2lab import paths
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.prepare.encode import Place
from gpt2lab.data.shards import (
    JOURNAL,
    MANIFEST,
    measure_shard,
    open_shard,
    shard_name,
    write_manifest,
)
from gpt2lab.errors import DataError
from gpt2lab.files import replace_durably, sync_folder

SMALLEST_LAST_SHARD = 65_536  # tokens; a smaller remainder joins the shard before
_HEADER_BYTES = 128  # of a .npy file with one dimension, whatever its length


class ShardWriter:
    """Fills shards of equal size; a file that has its final name is complete.

    The last shard of a split takes a small remainder along: in a shard of its own it could hold no window, and
    training rejects such shards.
    """

    def __init__(
        self, folder: Path, dataset: str, *, shard_tokens: int, files: list[dict[str, Any]]
    ) -> None:
        """`files`: what earlier starts have committed to `folder`, as listed in `self.files`."""
        self.files = files
        self._folder, self._dataset, self._shard_tokens = folder, dataset, shard_tokens
        self._temporary = folder / "shard.tmp"
        self._open: IO[bytes] | None = None
        self._written = 0  # tokens in the open file
        self._rest: list[np.ndarray] = []  # beyond shard_tokens: of the same shard or of the next
        self._held = 0

    def add(self, split: str, ids: np.ndarray) -> None:
        """Append ids, (n,) uint16, to a split; finish one split before the next begins.

        Raises: OSError, of a full disk for example.
        """
        while len(ids):
            room = self._shard_tokens - self._written
            if room:
                self._append(ids[:room])
                ids = ids[room:]
                continue
            self._rest.append(ids)
            self._held += len(ids)
            if self._held < min(self._shard_tokens, SMALLEST_LAST_SHARD):
                return
            ids = np.concatenate(self._rest)
            self._rest, self._held = [], 0
            self._commit(split)

    def finish(self, split: str) -> None:
        """Commit the last shard of a split.

        Raises: DataError if the split has fewer than two tokens, hence nothing to predict.
        """
        for ids in self._rest:
            self._append(ids)
        self._rest, self._held = [], 0
        held = self._written + sum(f["tokens"] for f in self.files if f["split"] == split)
        if held < 2:
            raise DataError(
                f"only {held} tokens for the {split} split; too little text, or --val_tokens takes all"
            )
        if self._written:
            self._commit(split)

    def close(self) -> None:
        """Drop the shard that is not finished."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.close()
            self._temporary.unlink(missing_ok=True)
            self._open = None

    def _append(self, ids: np.ndarray) -> None:
        if self._open is None:
            self._open = open(self._temporary, "wb+")  # noqa: SIM115 - closed at commit or in close()
            self._open.write(bytes(_HEADER_BYTES))
        self._open.write(ids.astype("<u2", copy=False).tobytes())
        self._written += len(ids)

    def _commit(self, split: str) -> None:
        """Write the header, read every byte once more to measure it, and give the file its name."""
        assert self._open is not None
        index = sum(file["split"] == split for file in self.files)
        path = self._folder / shard_name(self._dataset, split, index)
        self._open.seek(0)
        header = {"shape": (self._written,), "fortran_order": False, "descr": "<u2"}
        npy.write_array_header_1_0(self._open, header)
        assert self._open.tell() == _HEADER_BYTES
        self._open.flush()
        os.fsync(self._open.fileno())
        facts = measure_shard(self._temporary, offset=_HEADER_BYTES)
        self._open.close()
        self._open = None
        faultpoint("data.before_rename", len(self.files))
        os.rename(self._temporary, path)
        sync_folder(self._folder)
        self.files.append({"name": path.name, "split": split, "tokens": self._written, **facts})
        self._written = 0


class Unfinished:
    """The folder OUT.partial: finished shards and the journal, locked while a process works on it."""

    def __init__(self, target: Path, request: dict[str, Any]) -> None:
        """Open or create it.

        Raises: DataError if it belongs to another request, is in use, or cannot be written.
        """
        self.folder = target.with_name(f"{target.name}.partial")
        self.files: list[dict[str, Any]] = []
        self.place, self.drop = Place(), 0
        self._target, self._request = target, request
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "a")  # noqa: SIM115 - held until leave()
        except OSError as error:
            raise DataError(
                f"{self.folder}: cannot be written ({error.strerror}); choose another --out"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DataError(f"{self.folder}: another process is preparing this folder") from error
        try:
            self._read_journal()
        except BaseException:
            self._lock.close()
            raise

    def _read_journal(self) -> None:
        path = self.folder / JOURNAL
        if not path.exists():
            return
        try:
            journal = json.loads(path.read_bytes())
            if journal["request"] != self._request:
                raise DataError(
                    f"{self.folder}: holds the unfinished work of another command line or source; "
                    f"repeat it, or delete"
                )
            self.files, self.drop = journal["files"], journal["drop"]
            place = journal["place"]
            self.place = Place(place["bookmark"], place["pieces"], place["bad"], place["empty"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not readable ({error}); delete {self.folder}") from error
        for file in self.files:
            if open_shard(self.folder / file["name"]).tokens != file["tokens"]:
                raise DataError(f"{self.folder / file['name']}: changed; delete {self.folder}")

    def note(self, place: Place, drop: int) -> None:
        """Record that all in `files` is finished, and that the source goes on `drop` ids after `place`."""
        saved = dataclasses.asdict(place)
        saved["pieces"] = saved.pop("chunks")  # the journal's name for them
        journal = {"request": self._request, "files": self.files, "place": saved, "drop": drop}
        faultpoint("data.before_journal", len(self.files))
        replace_durably(self.folder / JOURNAL, json.dumps(journal) + "\n")
        faultpoint("data.after_journal", len(self.files))

    def complete(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and give the folder its final name."""
        for path in self.folder.glob("*.npy"):
            if path.name not in {file["name"] for file in self.files}:
                path.unlink()  # divided again, or written by a start that was killed
        (self.folder / MANIFEST).unlink(missing_ok=True)
        write_manifest(self.folder, manifest)
        faultpoint("data.before_folder_is_named", 0)
        os.rename(self.folder, self._target)
        faultpoint("data.after_folder_is_named", 0)
        sync_folder(self._target.parent)
        for leftover in (JOURNAL, "lock"):
            (self._target / leftover).unlink(missing_ok=True)

    @property
    def is_worth_keeping(self) -> bool:
        """Tell whether it holds a full shard; with less, starting again is quicker."""
        return any(file["tokens"] >= self._request["shard_tokens"] for file in self.files)

    def leave(self) -> str:
        """Keep the folder if it is worth keeping, else delete it; return a sentence that says which."""
        self._lock.close()
        if not self.folder.exists():
            return ""
        if not self.is_worth_keeping:
            shutil.rmtree(self.folder, ignore_errors=True)
            return "nothing was kept"
        kept = paths.for_people(self.folder)
        return f"{len(self.files)} finished shards are kept in {kept}: the same command line goes on from there"
