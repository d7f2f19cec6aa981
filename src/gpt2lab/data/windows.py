"""Read token windows from memory-mapped shards without keeping them resident."""

from __future__ import annotations

import hashlib
import mmap
from collections import OrderedDict

import numpy as np

from gpt2lab.data.shards import Shard
from gpt2lab.data.verifier import Verifier
from gpt2lab.errors import DataError

_OPEN_MAPS = (
    64  # a 100B-token set has a thousand shards, a process has about as many file descriptors
)


def hash_windows(windows: np.ndarray) -> str:
    """Hash a global batch, (S, T + 1) uint16 in sample order, to 64 hex digits: the `batch_hash` of a step."""
    return hashlib.sha256(windows.astype("<u2", copy=False).tobytes()).hexdigest()


class WindowReader:
    """Windows of T + 1 tokens, read by (shard, offset)."""

    def __init__(
        self,
        shards: tuple[Shard, ...],
        *,
        context_length: int,
        id_limit: int,
        verify: bool = False,
    ) -> None:
        """`verify`: hash each shard in the background when it is first touched, and compare with shards.json."""
        self._verifier = Verifier(shards) if verify else None
        self._shards = shards
        self._width = context_length + 1
        self._id_limit = id_limit
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the windows at (shards, offsets), both (n,), as an (n, T + 1) uint16 array.

        Raises: DataError naming the shard if it is gone, changed, found damaged, or an id is out of range (on a GPU
        that would end in an assertion that names nothing).
        """
        if self._verifier is not None:
            for shard in np.unique(shards).tolist():
                self._verifier.touch(shard)
        windows = np.empty((len(shards), self._width), dtype=np.uint16)
        for row, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            start = self._shards[shard].offset + 2 * offset
            try:
                source = self._map(shard)
                windows[row] = np.frombuffer(source, "<u2", count=self._width, offset=start)
            except (OSError, ValueError) as error:
                raise self._refusal(shard, f"changed while training ({error})") from error
        if windows.max(initial=0) >= self._id_limit:
            row = int((windows >= self._id_limit).any(axis=1).argmax())
            raise self._refusal(
                int(shards[row]),
                f"token id {windows[row].max()} near token {offsets[row]}, ids must be below {self._id_limit}",
            )
        return windows

    def wait_until_verified(self) -> None:
        """Return when all that was read so far is known to be undamaged.

        Raises: DataError naming a damaged shard.
        """
        if self._verifier is not None:
            self._verifier.wait()

    def release(self) -> None:
        """Give the pages read so far back: they stay in the system's cache, but not in this process."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap all shards and stop verifying."""
        if self._verifier is not None:
            self._verifier.close()
        while self._maps:
            self._maps.popitem()[1].close()

    def _refusal(self, shard: int, problem: str) -> DataError:
        error = DataError(
            f"{self._shards[shard].path}: {problem}; restore the file or prepare the data again"
        )
        error.is_local = True  # each process reads its own share
        return error

    def _map(self, shard: int) -> mmap.mmap:
        if shard in self._maps:
            self._maps.move_to_end(shard)
            return self._maps[shard]
        with open(self._shards[shard].path, "rb") as file:
            self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._maps) > _OPEN_MAPS:
            self._maps.popitem(last=False)[1].close()
        return self._maps[shard]
