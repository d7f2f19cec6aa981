"""Windows of tokens, read from shards that a thread verifies in the background.

Files are read by `preadv`: a memory map of a file that is truncated ends the process with SIGBUS.
"""

import hashlib
import os
import queue
import threading
import weakref
from collections import OrderedDict

import numpy as np

from gpt2lab.data.shards import Shard

_OPEN_FILES = 64  # a 100B-token set has a thousand shards; a process may open about as many files
_BLOCK = 1 << 22
_Identity = tuple[int, int, int, int]  # see `_identify`


def hash_windows(windows: np.ndarray) -> str:
    """Hash a global batch, (S, T + 1) in sample order, to 64 hex digits: the `batch_hash` of a step.

    Ids are hashed as little-endian uint32 where the data has such shards, else as uint16.
    """
    dtype = "<u4" if windows.dtype == np.uint32 else "<u2"
    return hashlib.sha256(windows.astype(dtype, copy=False).tobytes()).hexdigest()


class WindowReader:
    """Windows of T + 1 tokens, read by (shard, offset)."""

    def __init__(
        self, shards: tuple[Shard, ...], *, context_length: int, id_limit: int, verify: bool = False
    ) -> None:
        """`verify`: hash each shard in the background when it is first touched, and compare with shards.json."""
        self.verifier = Verifier(shards if verify else ())
        self._verifies = verify
        self.shards = shards
        self._width = context_length + 1
        self._id_limit = id_limit
        self._layout = [(shard.offset, shard.id_bytes, np.dtype(shard.dtype)) for shard in shards]
        is_wide = any(shard.dtype == "<u4" for shard in shards)
        self._dtype = np.dtype(np.uint32 if is_wide else np.uint16)
        self._files: OrderedDict[int, int] = OrderedDict()  # shard -> descriptor, last used last
        weakref.finalize(self, _close, self._files)
        weakref.finalize(self, self.verifier.close)  # its thread would live as long as the process

    def enter(self, shards: np.ndarray) -> None:
        """Verify these shards, which are about to be read, here or by another process of this machine.

        Raises: DataError if any shard that was verified so far is damaged.
        """
        if self._verifies:
            self.verifier.enter(set(np.unique(shards).tolist()))

    def read(
        self, shards: np.ndarray, offsets: np.ndarray, rows: slice = slice(None)
    ) -> np.ndarray:
        """Return `rows` of the windows at (shards, offsets), both (n,), as an (n, T + 1) array; verify all n.

        It is of uint32 if any of the reader's shards is, else of uint16.

        Raises: DataError naming the shard if it is gone, changed, damaged, or an id is out of range (on a GPU that
        would end in an assertion that names nothing).
        """
        self.enter(shards)
        shards, offsets = shards[rows], offsets[rows]
        windows = np.empty((len(shards), self._width), dtype=self._dtype)
        for row, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            begin, id_bytes, dtype = self._layout[shard]
            ids = windows[row] if dtype == self._dtype else np.empty(self._width, dtype)  # a view
            try:
                count = os.preadv(self._open(shard), [ids.data], begin + id_bytes * offset)
            except OSError as error:
                raise self.shards[shard].rejected(f"changed while training ({error})") from error
            if count != ids.nbytes:
                problem = f"changed while training (it ends within the window at token {offset})"
                raise self.shards[shard].rejected(problem)
            if ids.base is not windows:
                windows[row] = ids
        if windows.max(initial=0) >= self._id_limit:
            row = int((windows >= self._id_limit).any(axis=1).argmax())
            raise self.shards[shards[row]].rejected(
                f"token id {windows[row].max()} near token {offsets[row]}, ids must be below {self._id_limit}"
            )
        return windows

    def close(self) -> None:
        """Close all shards and stop verifying."""
        self.verifier.close()
        _close(self._files)

    def _open(self, shard: int) -> int:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        self._files[shard] = os.open(self.shards[shard].path, os.O_RDONLY)
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return self._files[shard]


def _close(files: OrderedDict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])


class Verifier:
    """A thread that compares shards with the sha256 in shards.json, each when it is first touched.

    A file that is another one since, or was written to, is hashed again: before a batch reads from it after one that
    did not, and before a save. If it was not verified before, nobody knows what was read. Damage found stops the run.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        self._seen: dict[int, _Identity | None] = {}  # of the shards touched
        self._inside: set[int] = set()  # the shards of the last batch
        self._is_stale = False
        self._verified: dict[Shard, _Identity | None] = {}  # as what file
        self._waiting: queue.Queue[Shard | None] = queue.Queue()
        self._damage: Exception | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, shards: set[int]) -> None:
        """Touch the shards of a batch that the batch before did not read.

        Raises: DataError if any shard touched so far is damaged.
        """
        self._raise_damage()
        for index in sorted(shards - self._inside):
            self.touch(index)
        self._inside = shards

    def touch_named(self, names: tuple[str, ...]) -> None:
        """Touch shards that a checkpoint of an earlier start rests on."""
        for index, shard in enumerate(self._shards):
            if shard.path.name in names:
                self.touch(index)

    def touch(self, index: int) -> None:
        """Queue a shard for verification if it is new and has a recorded hash; look whether a known one has changed.

        Raises: DataError if any shard touched so far turned out to be damaged.
        """
        self._raise_damage()
        if self._is_stale:  # what was verified before it was closed may have changed
            self._seen.clear()
            self._verified.clear()
            self._is_stale = False
        if index in self._seen:
            self._compare(index)
            return
        self._seen[index] = _identify(self._shards[index])
        if self._shards[index].sha256 is None:
            return
        self._waiting.put(self._shards[index])
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="shard verifier", daemon=True)
            thread.start()
            self._thread = thread  # one that could not start is not joined

    def wait(self) -> None:
        """Return when every shard touched so far is verified: a checkpoint may now rely on them.

        Raises: DataError naming a damaged one.
        """
        self._waiting.join()
        self._compare_all()

    def unverified(self) -> tuple[str, ...]:
        """Return the names of the shards touched so far that are not verified yet.

        Raises: DataError naming a damaged one.
        """
        self._compare_all(hash_changed=False)  # a stop has no time for that
        touched = (self._shards[index] for index in sorted(self._seen))
        return tuple(s.path.name for s in touched if s.sha256 and not self._is_verified(s))

    def close(self) -> None:
        """Stop verifying. A shard that a rewound run touches later is verified again."""
        self._is_closed.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._is_closed.clear()
        self._waiting = queue.Queue()
        self._inside = set()
        self._is_stale = True

    def _is_verified(self, shard: Shard) -> bool:
        return shard in self._verified and _identify(shard) in (self._verified[shard], None)

    def _raise_damage(self) -> None:
        if self._damage is not None:
            raise self._damage

    def _compare_all(self, *, hash_changed: bool = True) -> None:
        self._raise_damage()
        for index in list(self._seen):
            self._compare(index, hash_changed=hash_changed)

    def _compare(self, index: int, *, hash_changed: bool = True) -> None:
        """Hash a shard again, now, if its file is another one since it was last seen or was written to.

        A file that is gone is no longer compared: what was read of it was verified, and opening it will fail. Without
        `hash_changed` a changed file of the right size is only counted as not verified.
        """
        shard, before, now = self._shards[index], self._seen[index], _identify(self._shards[index])
        if now in (before, None):
            return
        if shard.sha256 is None:
            self._damage = shard.rejected(
                "changed while training, and there is no shards.json to compare it with"
            )
        elif before is not None and now[0] != before[0]:
            sizes = f"{now[0]} bytes, {before[0]} before"
            self._damage = shard.rejected(f"changed while training ({sizes})")
        elif not hash_changed:
            return
        elif before is not None and self._verified.get(shard) != before:
            self._damage = shard.rejected(
                "changed while training, before what was read of it was verified"
            )
        else:
            self._verify(shard, "changed while training (its sha256 is not the one in shards.json)")
        self._raise_damage()
        self._seen[index] = now

    def _work(self) -> None:
        while (shard := self._waiting.get()) is not None:
            try:
                if self._damage is None and not self._is_closed.is_set():
                    self._verify(shard)
            except Exception as error:  # such as no memory: reported to the training thread
                self._damage = error
            finally:
                self._waiting.task_done()

    def _verify(
        self, shard: Shard, problem: str = "damaged (its sha256 is not the one in shards.json)"
    ) -> None:
        digest, identity = hashlib.sha256(), _identify(shard)
        try:
            with open(shard.path, "rb", buffering=0) as file:
                while block := file.read(_BLOCK):
                    if self._is_closed.is_set():
                        return
                    digest.update(block)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if digest.hexdigest() == shard.sha256:
            self._verified[shard] = identity
        else:
            self._damage = shard.rejected(problem)


def _identify(shard: Shard) -> _Identity | None:
    """Return what tells that a file is the same and was not written to: size, time, inode; None if it is gone."""
    try:
        found = os.stat(shard.path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino
