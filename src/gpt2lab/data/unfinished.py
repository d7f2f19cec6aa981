"""What a preparation has finished, kept so that the same command line can go on: OUT.partial and its journal."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.encode import Place
from gpt2lab.data.shards import JOURNAL, MANIFEST, fingerprint_of, open_shard
from gpt2lab.errors import DataError
from gpt2lab.files import replace_durably, sync_folder, write_durably


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
        refusal = f"{self.folder}: holds the unfinished work of another command line or source; repeat it, or delete"
        try:
            journal = json.loads(path.read_bytes())
            if journal["request"] != self._request:
                raise DataError(refusal)
            self.files, self.drop = journal["files"], journal["drop"]
            self.place = Place(**journal["place"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not readable ({error}); delete {self.folder}") from error
        for file in self.files:
            if open_shard(self.folder / file["name"]).tokens != file["tokens"]:
                raise DataError(f"{self.folder / file['name']}: changed; delete {self.folder}")

    def note(self, place: Place, drop: int) -> None:
        """Write down that all in `files` is finished, and that the source goes on `drop` ids after `place`."""
        journal = {
            "request": self._request,
            "files": self.files,
            "place": dataclasses.asdict(place),
            "drop": drop,
        }
        faultpoint("data.before_journal", len(self.files))
        replace_durably(self.folder / JOURNAL, json.dumps(journal) + "\n")
        faultpoint("data.after_journal", len(self.files))

    def complete(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and give the folder its final name."""
        manifest["fingerprint"] = fingerprint_of(manifest)
        for path in self.folder.glob("*.npy"):  # cut again, or written by a start that was killed
            if path.name not in {file["name"] for file in self.files}:
                path.unlink()
        (self.folder / MANIFEST).unlink(missing_ok=True)
        write_durably(self.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        sync_folder(self.folder)
        faultpoint("data.before_folder_is_named", 0)
        os.rename(self.folder, self._target)
        faultpoint("data.after_folder_is_named", 0)
        sync_folder(self._target.parent)
        for leftover in (JOURNAL, "lock"):
            (self._target / leftover).unlink(missing_ok=True)

    @property
    def is_worth_keeping(self) -> bool:
        """Tell whether a whole shard is there: less is quicker done again than explained."""
        full = self._request["shard_tokens"]
        return any(file["tokens"] >= full for file in self.files)

    def leave(self) -> str:
        """Keep what is worth keeping, delete the rest, and say which of the two it was."""
        self._lock.close()
        if not self.folder.exists():
            return ""
        if not self.is_worth_keeping:
            shutil.rmtree(self.folder, ignore_errors=True)
            return "nothing was kept"
        kept = paths.for_people(self.folder)
        return f"{len(self.files)} finished shards are kept in {kept}: the same command line goes on from there"
