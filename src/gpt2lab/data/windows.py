"""Read token windows from memory-mapped shards without keeping them resident."""

from __future__ import annotations

import hashlib
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

    def __init__(
        self,
        shards: tuple[Shard, ...],
        *,
        context_length: int,
        id_limit: int,
        verify: bool = False,
    ) -> None:
        """`verify`: hash each shard when it is first touched and compare with shards.json."""
        self._unverified = {i for i, shard in enumerate(shards) if verify and shard.sha256}
        self._shards = shards
        self._width = context_length + 1
        self._id_limit = id_limit
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the windows at (shards, offsets), both (n,), as an (n, T + 1) uint16 array.

        Raises: DataError naming the shard if it is gone, changed, or an id is out of range (on a GPU that would end
        in an assertion that names nothing).
        """
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

    def release(self) -> None:
        """Give the pages read so far back: they stay in the system's cache, but not in this process."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap all shards."""
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
        if shard in self._unverified:
            if hashlib.sha256(self._maps[shard]).hexdigest() != self._shards[shard].sha256:
                raise self._refusal(shard, "damaged (its sha256 is not the one in shards.json)")
            self._unverified.remove(shard)
        if len(self._maps) > _OPEN_MAPS:
            self._maps.popitem(last=False)[1].close()
        return self._maps[shard]
