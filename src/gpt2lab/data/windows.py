"""Windows of tokens, read from memory-mapped shards that a thread verifies in the background."""

from __future__ import annotations

import hashlib
import mmap
import queue
import threading
from collections import OrderedDict

import numpy as np

from gpt2lab.data.shards import Shard
from gpt2lab.errors import DataError

_OPEN_MAPS = 64  # a 100B-token set has a thousand shards; a process may open about as many files
_BLOCK = 1 << 22


def hash_windows(windows: np.ndarray) -> str:
    """Hash a global batch, (S, T + 1) uint16 or uint32 in sample order, to 64 hex digits: a step's `batch_hash`."""
    dtype = "<u2" if windows.dtype == np.uint16 else "<u4"
    return hashlib.sha256(windows.astype(dtype, copy=False).tobytes()).hexdigest()


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
        self._dtype = np.uint32 if any(shard.item_bytes == 4 for shard in shards) else np.uint16
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the windows at (shards, offsets), both (n,), as an (n, T + 1) array of the ids' type.

        Raises: DataError naming the shard if it is gone, changed, damaged, or an id is out of range (on a GPU that
        would end in an assertion that names nothing).
        """
        if self._verifier is not None:
            for shard in np.unique(shards).tolist():
                self._verifier.touch(shard)
        windows = np.empty((len(shards), self._width), dtype=self._dtype)
        for row, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            read = self._shards[shard]
            start = read.offset + read.item_bytes * offset
            try:
                source = self._map(shard)
                windows[row] = np.frombuffer(source, read.dtype, count=self._width, offset=start)
            except (OSError, ValueError) as error:
                raise _shard_error(
                    self._shards[shard], f"changed while training ({error})"
                ) from error
        if windows.max(initial=0) >= self._id_limit:
            row = int((windows >= self._id_limit).any(axis=1).argmax())
            raise _shard_error(
                self._shards[shards[row]],
                f"token id {windows[row].max()} near token {offsets[row]}, ids must be below {self._id_limit}",
            )
        return windows

    def find(self, token: int) -> list[np.ndarray]:
        """Return the places of an id in each shard, in tokens from its beginning; reads every token once.

        Raises: DataError if a shard is gone or shorter than it was.
        """
        places = []
        for shard in self._shards:
            try:
                ids = np.memmap(
                    shard.path, shard.dtype, "r", offset=shard.offset, shape=(shard.tokens,)
                )
            except (OSError, ValueError) as error:
                raise _shard_error(shard, f"changed while training ({error})") from error
            places.append(np.flatnonzero(ids == token))
        return places

    def wait_until_verified(self) -> None:
        """Return when all shards read so far are known to be undamaged.

        Raises: DataError naming a damaged shard.
        """
        if self._verifier is not None:
            self._verifier.wait()

    def unverified(self) -> tuple[str, ...]:
        """Return the names of the shards read so far that are not verified yet.

        Raises: DataError naming a shard that turned out to be damaged.
        """
        return () if self._verifier is None else self._verifier.unverified()

    def verify(self, names: tuple[str, ...]) -> None:
        """Verify shards that a checkpoint of an earlier start rests on, in the background as all others."""
        if self._verifier is not None:
            for index, shard in enumerate(self._shards):
                if shard.path.name in names:
                    self._verifier.touch(index)

    def release(self) -> None:
        """Release the pages read so far: they stay in the system's cache, but not in this process."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap all shards and stop verifying."""
        if self._verifier is not None:
            self._verifier.close()
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


class Verifier:
    """A thread that compares shards with the sha256 in shards.json, each when it is first touched.

    Damage found stops the run.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        self._touched: set[int] = set()
        self._verified: set[Shard] = set()
        self._waiting: queue.Queue[Shard | None] = queue.Queue()
        self._damage: DataError | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def touch(self, index: int) -> None:
        """Queue a shard for verification if it is new and has a recorded hash.

        Raises: DataError if any shard touched so far turned out to be damaged.
        """
        if self._damage is not None:
            raise self._damage
        if self._thread is None:  # new, or closed: what was verified then may have changed
            self._touched.clear()
            self._verified.clear()
        if index in self._touched or self._shards[index].sha256 is None:
            return
        self._touched.add(index)
        self._waiting.put(self._shards[index])
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shard verifier", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when every shard touched so far is verified: a checkpoint may now rely on them.

        Raises: DataError naming a damaged one.
        """
        self._waiting.join()
        if self._damage is not None:
            raise self._damage

    def unverified(self) -> tuple[str, ...]:
        """Return the names of the shards touched so far that are not verified yet.

        Raises: DataError naming a damaged one.
        """
        if self._damage is not None:
            raise self._damage
        touched = (self._shards[index] for index in sorted(self._touched))
        return tuple(shard.path.name for shard in touched if shard not in self._verified)

    def close(self) -> None:
        """Stop verifying. A shard that a rewound run touches later is verified again."""
        self._is_closed.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._is_closed.clear()
        self._waiting = queue.Queue()

    def _work(self) -> None:
        while (shard := self._waiting.get()) is not None:
            try:
                if self._damage is None and not self._is_closed.is_set():
                    self._verify(shard)
            finally:
                self._waiting.task_done()

    def _verify(self, shard: Shard) -> None:
        digest = hashlib.sha256()
        problem = "damaged (its sha256 is not the one in shards.json)"
        try:
            with open(shard.path, "rb", buffering=0) as file:
                while block := file.read(_BLOCK):
                    if self._is_closed.is_set():
                        return
                    digest.update(block)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if digest.hexdigest() == shard.sha256:
            self._verified.add(shard)
        else:
            self._damage = _shard_error(shard, problem)


def _shard_error(shard: Shard, problem: str) -> DataError:
    error = DataError(f"{shard.path}: {problem}; restore the file or prepare the data again")
    error.is_local = True  # each rank reads windows of its own
    return error
