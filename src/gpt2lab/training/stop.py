"""What asks a run to end: signals, the death of the launcher, and moments on the clock. No torch.

A process that waits inside a collective runs no Python signal handler. Therefore a thread reads the signals from a
socket (`signal.set_wakeup_fd`) and counts them.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gpt2lab.errors import ConfigError
from gpt2lab.paths import LAUNCHED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1
STACKS_SIGNAL = signal.SIGUSR2
GIVE_UP_AFTER = 3  # the third signal ends the process at once
SAME_REQUEST_SECONDS = 0.2  # the kernel sends one signal for each thread of a dying launcher
COMMIT_SECONDS = 5.0  # that it waits for a commit in flight


class Signals:
    """Counts the signals received. Level 1: finish the step, save, end; 2: without a report; 3: end now."""

    def __init__(self) -> None:
        self.level = 0  # how often it was asked to stop
        self.number = 0  # the signal that asked last
        self.wants_save = False
        # Answers a request to stop: its signal, and how often it was asked. Called in another thread.
        self.answer: Callable[[int, int], None] = lambda number, level: None
        # Tells whether another process commits a checkpoint for this one. Called in another thread.
        self.is_writing: Callable[[], bool] = lambda: False
        # Until the first step there is nothing to save: our own programs end at once, the API's caller continues.
        self.ends_at_once = self._is_program = signal.getsignal(signal.SIGTERM) is end_at_once
        self.has_failed = False  # and the program has not printed why yet
        self._committing = False
        self.asked_at = -SAME_REQUEST_SECONDS  # when, last, on the monotonic clock
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {  # they do nothing: the thread acts
            number: signal.signal(number, lambda *_: None)
            for number in (*STOP_SIGNALS, SAVE_SIGNAL)
            if number == SAVE_SIGNAL or not is_ignored(number)
        }
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with self._receiver:
            while numbers := self._receiver.recv(64):  # empty once the other end is closed
                for number in numbers:
                    self._count(number)

    def _count(self, number: int) -> None:
        if number == SAVE_SIGNAL:
            self.wants_save = True
        if number not in STOP_SIGNALS:
            return
        if self.ends_at_once:
            end_at_once(number)
        now = time.monotonic()
        if now - self.asked_at < SAME_REQUEST_SECONDS:
            return
        self.asked_at = now
        self.level, self.number = self.level + 1, number
        if self.level >= GIVE_UP_AFTER:
            until = time.monotonic() + COMMIT_SECONDS
            while (self._committing or self.is_writing()) and time.monotonic() < until:
                time.sleep(0.02)
            os._exit(128 + number)
        # In a separate thread: a terminal that takes no output must not block the next signal.
        asked = (number, self.level)
        with suppress(RuntimeError):  # no room for a thread: no answer
            threading.Thread(target=self._answer, args=asked, name="answer", daemon=True).start()

    def _answer(self, number: int, level: int) -> None:
        with suppress(Exception):  # a closed log or terminal
            self.answer(number, level)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Mark a commit in flight: the third signal lets it end, for some seconds."""
        self._committing = True
        try:
            yield
        finally:
            self._committing = False

    def close(self) -> None:
        """Restore the previous signal handlers.

        A program that failed ignores SIGTERM until it ends: torchrun sends it to a rank that survives another.
        """
        signal.set_wakeup_fd(self._wakeup)
        if self._is_program and self.has_failed:
            self._handlers[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._sender.close()
        self._thread.join()


def is_ignored(number: int) -> bool:
    """Tell whether whoever started this process had it ignore a signal: `nohup`, or a shell's `&` in a script."""
    return signal.getsignal(number) is signal.SIG_IGN


def more_to_abort(number: int, level: int) -> str:
    """Return the hint, after Ctrl+C, how to abort."""
    if number != signal.SIGINT:
        return ""
    return "; press twice more to abort" if level == 1 else "; press once more to abort"


PARENT = "GPT2LAB_PARENT"  # the process that this one ends with; torchrun does not set it


def end_at_once_on(*numbers: int) -> None:
    """Have these signals end this process at once, default all that stop a run, and end with its launcher.

    The first lines of a program call it: importing torch takes seconds, and waiting for other ranks may take an hour.
    `Signals` replaces the handlers.
    """
    for number in numbers or STOP_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_at_once)
    parent = os.environ.pop(PARENT, "")
    if parent.isdecimal() or "RANK" in os.environ:
        end_with_parent(int(parent) if parent.isdecimal() else None)


def end_at_once(number: int, frame: FrameType | None = None) -> NoReturn:
    """End this process with exit code 1, without an exception: imported C++ code would abort on one."""
    if os.environ.get("RANK", "0") == "0" and LAUNCHED not in os.environ:
        with suppress(OSError):
            os.write(2, f"{interruption(number)}\n".encode())
    os._exit(1)


def interruption(number: int) -> str:
    """Return the line of a program that a signal has ended."""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return f"error: interrupted{by}"


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel send SIGTERM when the launcher dies; else its workers would keep training and hold their GPUs.

    torchrun dies without notice to its workers on SIGKILL, SIGUSR1 and the third Ctrl+C. Linux only.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    now = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have died before the kernel knew. torchrun tells its workers no process id.
    is_lost = parent is None and "TORCHELASTIC_RUN_ID" in os.environ and _is_init(now)
    if is_lost or os.getppid() != (parent or now):
        os.kill(os.getpid(), signal.SIGTERM)


def _is_init(process: int) -> bool:
    """Tell whether a process adopts orphans: pid 1, unless it is a launcher as in a container, or a user's systemd."""
    program = ""
    with suppress(OSError):  # another user's, or the system's
        program = Path(os.readlink(f"/proc/{process}/exe")).name
    return program == "systemd" or (process == 1 and "python" not in program)


GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def launcher_grace_seconds(environ: Mapping[str, str]) -> float | None:
    """Return how long torchrun waits between asking its workers to stop and killing them; None without torchrun.

    Its flag --shutdown-timeout can be read only from its command line.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    command = ""
    with suppress(OSError):
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " ")
    typed = re.search(r"--shutdown[-_]timeout[= ](\d+)", command)
    return float(typed[1] if typed else environ.get(GRACE, "30"))


def show_stacks_on_request() -> None:
    """Print every thread's stack on SIGUSR2 and on a crash of the interpreter, without ending anything else."""
    if sys.__stderr__ is None:
        return
    with suppress(OSError, ValueError, AttributeError):  # no real stderr
        faulthandler.enable(sys.__stderr__)
        faulthandler.register(STACKS_SIGNAL, sys.__stderr__)


# -- deadlines -------------------------------------------------------------------------------------------------------

# Rank 0 alone looks at the clock and sends the others an index into this list. A moment becomes a reading of the
# monotonic clock once, at the start: clocks that jump later change nothing.
REASONS = ("max_hours", "stop_at", "SLURM_JOB_END_TIME")


def find_deadlines(
    stop_at: str | None,
    environ: Mapping[str, str],
    *,
    max_hours: float | None = None,
    now: datetime | None = None,
) -> dict[str, float]:
    """Return {reason: moment on the monotonic clock}: --max_hours, --stop_at, and the end of a Slurm job.

    Raises: ConfigError if --stop_at is not a moment, or has passed.
    """
    now = now or datetime.now().astimezone()
    moments: dict[str, float] = {}
    if max_hours is not None:
        moments["max_hours"] = now.timestamp() + 3600 * max_hours
    if stop_at is not None:
        moments["stop_at"] = parse_moment(stop_at, now=now).timestamp()
    slurm = environ.get("SLURM_JOB_END_TIME", "")
    if slurm.isdigit() and int(slurm) > 0:
        moments["SLURM_JOB_END_TIME"] = float(slurm)
    return {name: time.monotonic() + at - now.timestamp() for name, at in moments.items()}


def parse_moment(text: str, *, now: datetime) -> datetime:
    """Return the moment that `HH:MM` (the next one), or an ISO date and time, means.

    Raises: ConfigError.
    """
    wall = now.astimezone().replace(tzinfo=None)
    try:
        if clock := re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip()):
            moment = wall.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
            moment = moment if moment > wall else moment + timedelta(days=1)
        else:
            moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        moment = moment.astimezone()  # by the clock of that day: summer time may begin before it
    except (ValueError, OverflowError):
        raise ConfigError(
            f"stop_at {text!r} is no moment; write 18:30 or 2026-11-21T18:30 (local time, or with +02:00)"
        ) from None
    if moment <= now:
        raise ConfigError(f"stop_at {text} has passed; it is {now:%Y-%m-%dT%H:%M} now")
    return moment


def find_due(deadlines: Mapping[str, float], *, margin_seconds: float) -> str | None:
    """Return the reason of a deadline that is less than the margin away, or None."""
    now = time.monotonic()
    return next((name for name, at in deadlines.items() if at - now < margin_seconds), None)
