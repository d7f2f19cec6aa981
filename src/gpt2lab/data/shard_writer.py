"""Ids -> shard files of equal size, written as a stream; a name that exists is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.shards import shard_name
from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, token_bytes

SMALLEST_LAST_SHARD = 65_536  # tokens; a smaller remainder joins the shard before
_HEADER_BYTES = 128  # of a .npy file with one dimension, whatever its length
_BLOCK = 1 << 22


class ShardWriter:
    """Fills shards of equal size; the last of a split takes a small remainder along.

    A remainder of a few tokens in a shard of its own could hold no window, and training refuses such shards.
    """

    def __init__(
        self, folder: Path, dataset: str, *, shard_tokens: int, files: list[dict[str, Any]]
    ) -> None:
        """`files`: what earlier starts have committed to `folder`, as listed in `self.files`."""
        self.files = files
        self._folder, self._dataset, self._shard_tokens = folder, dataset, shard_tokens
        self._open: IO[bytes] | None = None
        self._written = 0  # tokens in the open file
        self._rest: list[np.ndarray] = []  # beyond shard_tokens: of the same shard or of the next
        self._held = 0

    def add(self, split: str, ids: np.ndarray) -> None:
        """Append ids, (n,) uint16, to a split; a split is begun once the one before is finished.

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

        Raises: DataError if the split has no two tokens, hence nothing to predict.
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

    @property
    def _temporary(self) -> Path:
        return self._folder / "shard.tmp"

    def _append(self, ids: np.ndarray) -> None:
        if self._open is None:
            self._open = open(self._temporary, "wb+")  # noqa: SIM115 - closed at commit or in close()
            self._open.write(bytes(_HEADER_BYTES))
        self._open.write(ids.astype("<u2", copy=False).tobytes())
        self._written += len(ids)

    def _commit(self, split: str) -> None:
        """Put the header in front, look at every byte once more, and give the file its name."""
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


def measure_shard(path: Path, *, offset: int) -> dict[str, Any]:
    """Read a whole shard: its bytes, sha256, largest id, documents, and bytes of text (None for ids above GPT-2's)."""
    digest, largest, documents = hashlib.sha256(), 0, 0
    text_bytes: int | None = 0
    lengths = token_bytes()
    with open(path, "rb") as file:
        digest.update(file.read(offset))
        while block := file.read(_BLOCK):
            digest.update(block)
            ids = np.frombuffer(block, "<u2")
            largest = max(largest, int(ids.max()))
            documents += int(np.count_nonzero(ids == END_OF_TEXT))
            if text_bytes is not None:
                fits = largest < len(lengths)
                text_bytes = text_bytes + int(lengths[ids].sum()) if fits else None
        size = file.tell()
    return {
        "bytes": size,
        "sha256": digest.hexdigest(),
        "max_id": largest,
        "documents": documents,
        "text_bytes": text_bytes,
    }
