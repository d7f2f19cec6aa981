"""Ids -> shard files of equal size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.shards import measure_shard
from gpt2lab.files import sync_folder
from gpt2lab.tokenizers.interface import Tokenizer

SMALLEST_LAST_SHARD = 65_536  # tokens; a smaller remainder joins the shard before
_HEADER_BYTES = 128  # of a .npy file with one dimension, whatever its length


class ShardWriter:
    """Fills shards of equal size; a file that has its final name is complete.

    The last shard takes a small remainder along: in a shard of its own it could hold no window, and training rejects
    such shards.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        shard_tokens: int,
        name_of: Callable[[int], str],
        tokenizer: Tokenizer,
    ) -> None:
        """Write shards of a split into `folder`, each with the name of its number."""
        self.files: list[dict[str, Any]] = []  # as in shards.json
        self.tokens = 0
        self._folder, self._split, self._name_of = folder, split, name_of
        self._shard_tokens, self._tokenizer = shard_tokens, tokenizer
        self._temporary = folder / f"{split}.tmp"
        self._open: IO[bytes] | None = None
        self._written = 0  # tokens in the open file
        self._rest: list[np.ndarray] = []  # beyond shard_tokens: of the same shard or of the next
        self._held = 0

    def add(self, ids: np.ndarray) -> None:
        """Append ids, (n,) of the tokenizer's type.

        Raises: OSError, of a full disk for example.
        """
        self.tokens += len(ids)
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
            self._commit()

    def finish(self) -> None:
        """Commit the last shard."""
        for ids in self._rest:
            self._append(ids)
        self._rest, self._held = [], 0
        if self._written:
            self._commit()

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
        self._open.write(ids.astype(self._tokenizer.dtype, copy=False).tobytes())
        self._written += len(ids)

    def _commit(self) -> None:
        """Write the header, read every byte once more to measure it, and give the file its name."""
        assert self._open is not None
        name = self._name_of(len(self.files))
        self._open.seek(0)
        dtype = self._tokenizer.dtype
        header = {"shape": (self._written,), "fortran_order": False, "descr": dtype}
        npy.write_array_header_1_0(self._open, header)
        assert self._open.tell() == _HEADER_BYTES
        self._open.flush()
        os.fsync(self._open.fileno())
        facts = measure_shard(
            self._temporary,
            offset=_HEADER_BYTES,
            dtype=dtype,
            tokenizer=self._tokenizer,
            end_of_text=self._tokenizer.end_of_text,
        )
        self._open.close()
        self._open = None
        faultpoint("data.before_rename", len(self.files))
        os.rename(self._temporary, self._folder / name)
        sync_folder(self._folder)
        self.files.append({"name": name, "split": self._split, "tokens": self._written, **facts})
        self._written = 0
