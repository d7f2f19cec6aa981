"""A process that writes checkpoints from shared memory while the trainer trains on. No torch.

The trainer copies the tensors of a checkpoint into a buffer that both processes see, and sends its draft. The writer
commits that draft as the trainer would (manifest.commit) and answers. The writer inherits the trainer's lock of the
run's folder, so that no other start trains there before the writer has ended. It ends at once when the trainer does.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from gpt2lab import paths
from gpt2lab.checkpoint import manifest as manifests
from gpt2lab.checkpoint.manifest import Draft

_END_SECONDS = 5.0  # a writer that has nothing to do ends in milliseconds
# A terminal, a launcher or Slurm sends these to all processes of a job; the trainer handles them.
_SIGNALS_OF_TRAINER = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP),
)

Place = bytes | tuple[int, int]  # a part of a file: its bytes, or their begin and end in the buffer
Files = dict[str, list[Place]]


class SharedBuffer:
    """Memory that a trainer and its writer both see; it has no name and is freed when the last of them ends.

    /dev/shm is not used: containers give it 64 MB.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate all of it at once, so that no later write finds no memory.

        Raises: OSError.
        """
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("checkpoint")
        try:
            os.posix_fallocate(self.fd, 0, num_bytes)
            self.memory = mmap.mmap(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = _address(self.memory)

    def place_of(self, part: bytes | memoryview) -> Place:
        """Return begin and end of a part that lies in the buffer, any other part itself."""
        if isinstance(part, bytes) or part.nbytes == 0:
            return bytes(part)
        begin = _address(part) - self.address
        assert 0 <= begin <= begin + part.nbytes <= self.num_bytes
        return begin, begin + part.nbytes

    def close(self) -> None:
        """Close the file; the memory stays for as long as something refers to it."""
        os.close(self.fd)


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(frozen=True)
class Answer:
    """How a save ended."""

    at: float  # on the monotonic clock, which processes share
    error: Exception | None
    is_last: bool = False  # the process has ended


class Writer:
    """The trainer's handle on its writer process, which has at most one save at a time."""

    def __init__(self, buffer: SharedBuffer, *, lock: int) -> None:
        """Start the process; `lock` is the open file that locks the run's folder.

        Raises: OSError.
        """
        self._buffer = buffer
        self._connection, other = Pipe()
        # The process starts with these signals blocked, so there is no instant in which one could end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_TRAINER)
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gpt2lab.checkpoint.writer"),
                    *(str(other.fileno()), str(buffer.fd)),
                ],
                env=paths.child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(other.fileno(), buffer.fd, lock),
            )
        except BaseException:
            self._connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            other.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, run_dir: Path, draft: Draft) -> None:
        """Have a checkpoint written whose tensors lie in the buffer.

        Raises: OSError if the process has ended.
        """
        files = {
            name: [self._buffer.place_of(part) for part in parts]
            for name, parts in draft.files.items()
        }
        # As JSON: to unpickle a value of a torch type, such as torch's version, the writer would import torch.
        self._connection.send((str(run_dir), draft.step, files, json.dumps(draft.facts)))

    def has_answered(self) -> bool:
        """Tell whether `wait` returns at once: the save has ended, or the process."""
        try:
            return self._connection.poll()
        except OSError:  # closed
            return True

    def wait(self) -> Answer:
        """Wait for the end of the save, or of the process."""
        try:
            return Answer(*self._connection.recv())
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            error = OSError(f"the writer process ended ({how})")
            return Answer(time.monotonic(), error, is_last=True)

    def close(self) -> None:
        """End the process; a save under way is given up."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it is stopped, or its disk hangs
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)


def serve(connection: Connection, memory: memoryview) -> None:
    """Commit what comes until the trainer closes the connection or has ended."""
    jobs: queue.SimpleQueue[tuple[str, int, Files, str]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            error = _commit(*jobs.get(), memory)
            connection.send((time.monotonic(), error))

    # RuntimeError: no memory for a thread; the trainer then reports that this process ended.
    with suppress(EOFError, OSError, RuntimeError):
        threading.Thread(target=work, daemon=True).start()
        while True:
            jobs.put(connection.recv())
    os._exit(0)  # also within a save: its folder has no name yet, and the next start removes it


def _commit(
    run_dir: str, step: int, files: Files, facts: str, memory: memoryview
) -> Exception | None:
    parts = {
        name: [place if isinstance(place, bytes) else memory[slice(*place)] for place in places]
        for name, places in files.items()
    }
    try:
        manifests.commit(Path(run_dir), Draft(step, parts, json.loads(facts)))
    except Exception as error:  # the trainer raises it
        return error
    return None


if __name__ == "__main__":
    _CONNECTION, _MEMORY = map(int, sys.argv[1:])
    serve(Connection(_CONNECTION), memoryview(mmap.mmap(_MEMORY, 0, access=mmap.ACCESS_READ)))
