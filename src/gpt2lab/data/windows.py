"""Read token windows from memory-mapped shards without keeping them resident."""

from __future__ import annotations

import mmap
from collections import OrderedDict

import numpy as np

from gpt2lab.data.shards import Shard
from gpt2lab.errors import DataError

_OPEN_MAPS = (
    64  # a 100B-token set has a thousand shards, a process has about as many file descriptors
)


class WindowReader:
    """Windows of T + 1 tokens, read by (shard, offset)."""

    def __init__(self, shards: tuple[Shard, ...], *, context_length: int, id_limit: int) -> None:
        self._shards = shards
        self._width = context_length + 1
        self._id_limit = id_limit
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the windows at (shards, offsets), both (n,), as an (n, T + 1) uint16 array.

        Raises: DataError naming the shard if an id is out of range (a damaged or foreign file): on a GPU it would
        end in an assertion that names nothing.
        """
        windows = np.empty((len(shards), self._width), dtype=np.uint16)
        for row, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            start = self._shards[shard].offset + 2 * offset
            try:
                source = self._map(shard)
                windows[row] = np.frombuffer(source, "<u2", count=self._width, offset=start)
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self._shards[shard].path}: changed while training ({error}); restore the file and resume"
                ) from error
        if windows.max(initial=0) >= self._id_limit:
            row = int((windows >= self._id_limit).any(axis=1).argmax())
            path = self._shards[int(shards[row])].path
            raise DataError(
                f"{path}: token id {windows[row].max()} near token {offsets[row]}, but ids must be below "
                f"{self._id_limit}; restore the file or prepare the data again"
            )
        return windows

    def release(self) -> None:
        """Give the pages read so far back: they stay in the system's cache, but not in this process."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap all shards."""
        while self._maps:
            self._maps.popitem()[1].close()

    def _map(self, shard: int) -> mmap.mmap:
        if shard in self._maps:
            self._maps.move_to_end(shard)
            return self._maps[shard]
        with open(self._shards[shard].path, "rb") as file:
            self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._maps) > _OPEN_MAPS:
            self._maps.popitem(last=False)[1].close()
        return self._maps[shard]
