"""Shards hashed in the background, each when it is first touched: damage stops the run, and costs no step."""

from __future__ import annotations

import hashlib
import queue
import threading

from gpt2lab.data.shards import Shard
from gpt2lab.errors import DataError

_BLOCK = 1 << 22


class Verifier:
    """A thread that compares the contents of shards with the sha256 in shards.json, in the order of first touch."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        self._touched: set[int] = set()
        self._waiting: queue.Queue[Shard | None] = queue.Queue()
        self._damage: DataError | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def touch(self, index: int) -> None:
        """See to it that a shard is verified, now or soon; a shard without recorded hash cannot be.

        Raises: DataError if any shard touched so far turned out to be damaged.
        """
        if self._damage is not None:
            raise self._damage
        if index in self._touched:
            return
        self._touched.add(index)
        if self._shards[index].sha256 is None:
            return
        self._waiting.put(self._shards[index])
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shard verifier", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when every shard touched so far is verified: what rests on them may now be kept.

        Raises: DataError naming a damaged one.
        """
        self._waiting.join()
        if self._damage is not None:
            raise self._damage

    def close(self) -> None:
        """Stop verifying. What is touched later, by a run that went back, is verified anew."""
        self._is_closed.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._is_closed.clear()
        self._waiting = queue.Queue()
        self._touched.clear()

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
        if digest.hexdigest() != shard.sha256:
            damage = DataError(
                f"{shard.path}: {problem}; restore the file or prepare the data again"
            )
            damage.is_local = True  # the other processes have not looked
            self._damage = damage
