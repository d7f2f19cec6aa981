"""What reaches a process from outside: signals, and the death of the program that started it. No torch.

A handler only counts. A signal may land anywhere, and a process that waits inside a collective runs no Python handler
at all: therefore a thread reads the signals from a socket, as `signal.set_wakeup_fd` offers.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1
STACKS_SIGNAL = signal.SIGUSR2
GIVE_UP_AFTER = 3  # the third signal ends the process where it stands
ONE_WISH_SECONDS = 0.2  # a dying launcher's every thread has the kernel send one more
COMMIT_SECONDS = 5.0  # what a commit in flight is given then


class Signals:
    """What this process was asked for, counted. Level 1: finish the step, save, end; 2: only that; 3: end now."""

    def __init__(self) -> None:
        self.level = 0  # how often it was asked to stop
        self.number = 0  # the signal that asked last
        self.wants_save = False
        self._committing = False
        self._last = -ONE_WISH_SECONDS  # when it was asked last, on the monotonic clock
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        handled = (*STOP_SIGNALS, SAVE_SIGNAL)
        self._handlers = {number: signal.signal(number, _leave_to_thread) for number in handled}
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with self._ears:
            while numbers := self._ears.recv(64):  # empty once the other end is closed
                for number in numbers:
                    self._count(number)

    def _count(self, number: int) -> None:
        if number == SAVE_SIGNAL:
            self.wants_save = True
        if number not in STOP_SIGNALS:
            return
        now = time.monotonic()
        if now - self._last < ONE_WISH_SECONDS:
            return
        self._last = now
        self.level, self.number = self.level + 1, number
        if self.level >= GIVE_UP_AFTER:
            until = time.monotonic() + COMMIT_SECONDS
            while self._committing and time.monotonic() < until:
                time.sleep(0.02)
            os._exit(128 + number)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Mark a commit in flight: the third signal lets it end, for some seconds."""
        self._committing = True
        try:
            yield
        finally:
            self._committing = False

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._mouth.close()
        self._thread.join()


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    pass


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the launcher dies; else its workers train on, and hold their GPUs.

    torchrun dies without a word to its workers on SIGKILL, SIGUSR1 and the third Ctrl+C. Linux only.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)


def launcher_grace_seconds(environ: Mapping[str, str]) -> float | None:
    """Return how long torchrun waits between asking its workers to stop and killing them; None without torchrun.

    Its flag --shutdown-timeout is only to be seen on its own command line.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    command = ""
    with suppress(OSError):
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " ")
    typed = re.search(r"--shutdown[-_]timeout[= ](\d+)", command)
    return float(typed[1] if typed else environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


def show_stacks_on_request() -> None:
    """Print every thread's stack on SIGUSR2 and on a crash of the interpreter, without ending anything else."""
    if sys.__stderr__ is None:
        return
    with suppress(OSError, ValueError, AttributeError):  # no real stderr: nobody would read it
        faulthandler.enable(sys.__stderr__)
        faulthandler.register(STACKS_SIGNAL, sys.__stderr__)
