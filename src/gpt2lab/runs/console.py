"""The console of a run: lines that stay, one line that rewrites itself on a terminal, and beats of long work.

A pipe that nobody reads and a terminal stopped by Ctrl+S would stop the program, whatever it holds at that moment. So
nothing waits for a reader of standard output, nor of standard error once `never_wait_for_stderr` was called.
"""

from __future__ import annotations

import atexit
import contextlib
import select
import shutil
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

BEAT_SECONDS = 4.0
_WATCHED_SECONDS = 600.0  # for which somebody may watch a file from the start of a run
_SILENT_SECONDS = (5.0, 30.0)  # that a file may be without a line: while a run is young, and later
_CAPACITY = 2**20  # characters that wait for a reader: thousands of lines
_PATIENCE_SECONDS = 10.0  # at the end of a run, for output that has stopped
_PART = 1024  # characters written at a time: a pipe that takes output has room for 4 kB
_INDENT = 15  # of what belongs to the line above, as the labels of a start's first lines


class Output:
    """A stream that is never waited for; safe to use from several threads.

    Text waits in memory for a reader that is slow, and goes out with later text. Text that finds no room there is left
    out, and its lines are counted.
    """

    def __init__(self, stream: TextIO, missing: str) -> None:
        """`missing`: what tells of lines left out, before their number."""
        self.lock = threading.RLock()
        self._stream, self._missing = stream, missing
        self._write, self._flush = stream.write, stream.flush  # those of a stream may be replaced
        self._waiting: deque[str] = deque()  # parts that the stream did not take yet
        self._left_out = 0  # lines, since there was room for text

    @property
    def is_waiting(self) -> bool:
        """Tell whether the stream did not take all text yet."""
        return bool(self._waiting)

    def has_room(self, text: str) -> bool:
        """Write what waits, and tell whether text can be put behind it; else count its lines.

        Raises: OSError.
        """
        self.write_on()
        if sum(map(len, self._waiting)) + len(text) > _CAPACITY:
            self._left_out += max(1, text.count("\n"))
            return False
        return True

    def put(self, text: str) -> None:
        """Let text wait. A carriage return must begin it, else it is escaped (commands/entry.py)."""
        self._waiting.extend(text[i : i + _PART] for i in range(0, len(text), _PART))

    def tell_missing(self) -> None:
        """Say how many lines were left out."""
        if self._left_out:
            self.put(f"({self._missing}: {self._left_out:,}; nobody took them here)\n")
            self._left_out = 0

    def write_on(self, patience: float | None = 0.0) -> None:
        """Write what waits, until the stream takes nothing for `patience` seconds; None: until all is written.

        Raises: OSError.
        """
        while self._waiting and self._takes_output(patience):
            self._write(self._waiting.popleft())
            self._flush()

    def close(self, patience: float | None) -> None:
        """Write what waits, as `write_on` does, and discard the rest.

        Raises: OSError.
        """
        with self.lock:
            self.tell_missing()
            self.write_on(patience)
            self._waiting.clear()

    def _takes_output(self, patience: float | None) -> bool:
        try:
            return bool(select.select([], [self._stream], [], patience)[1])
        except ValueError:  # no file of the system, as in tests: nothing to wait for
            return True


def say(text: str = "") -> None:
    """Print a line to standard error at once: progress and warnings of a command, whose answer alone is on stdout."""
    print(text, file=sys.stderr, flush=True)


def never_wait_for_stderr() -> None:
    """From here to its end, have this process never wait for a reader of standard error, nor fail for want of one."""
    stream = sys.stderr
    if not stream or hasattr(stream, "finish"):  # closed, or done already
        return
    output = Output(stream, "lines of warnings left out")

    def write(text: str) -> int:
        with output.lock, contextlib.suppress(OSError):
            if output.has_room(text):
                output.tell_missing()
                output.put(text)
                output.write_on()
        return len(text)

    def finish() -> None:
        with contextlib.suppress(OSError):
            output.close(_PATIENCE_SECONDS)

    replaced = {"write": write, "flush": lambda: None, "finish": finish}
    for name, function in replaced.items():
        setattr(stream, name, function)
    atexit.register(finish)


def finish_stderr() -> None:
    """Before the process ends at once: give a slow reader of standard error the time that an ordinary end gives."""
    getattr(sys.stderr, "finish", sys.stderr.flush)()


class Console:
    """Standard output; safe to use from several threads."""

    def __init__(self) -> None:
        self._output = Output(sys.stdout, "lines that are in log.txt only")
        self._shown = 0  # characters of the line that will be rewritten
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    @property
    def is_terminal(self) -> bool:
        """Tell whether a person watches."""
        return self._width is not None

    def print(self, text: str, short: str | None = None) -> None:
        """Print text; on a terminal too narrow for it `short`, or wrapped.

        A line with a command stays whole, so that it can be copied.

        Raises: OSError.
        """
        if self._width is not None and short is not None and len(text) > self._width:
            text = short
        text = text if self._width is None else wrap(text, self._width)
        with self._output.lock:
            if self._output.has_room(text):
                self._remove_shown()
                self._output.tell_missing()
                self._output.put(text + "\n")
                self._output.write_on()

    def show(self, text: str) -> None:
        """Replace the rewriting line, on a terminal; nothing elsewhere.

        Raises: OSError.
        """
        if self._width is None:
            return
        with self._output.lock:
            self._output.write_on()
            if self._output.is_waiting:
                return
            text = text[: self._width - 1]
            self._output.put("\r" + text.ljust(self._shown))
            self._shown = len(text)
            self._output.write_on()

    def close(self, patience: float | None = _PATIENCE_SECONDS) -> None:
        """Remove the rewriting line, and wait for a reader until it takes nothing for `patience` seconds; None: always.

        What another program or stderr writes next begins a line.

        Raises: OSError.
        """
        with self._output.lock:
            self._remove_shown()
            self._output.close(patience)

    def _remove_shown(self) -> None:
        if self._shown:
            self._output.put("\r" + " " * self._shown)
            self._output.put("\r")
            self._shown = 0


def silence_ends(silent: float, *, step_seconds: float, since_start: float) -> bool:
    """Tell whether a file gets a line now: without one, another step would make the silence too long."""
    return silent + step_seconds > _SILENT_SECONDS[since_start >= _WATCHED_SECONDS]


def wrap(text: str, width: int) -> str:
    """Return text with lines of at most `width` columns, but for words that are longer and lines with a command."""
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width or " --" in line:
            lines.append(line)
            continue
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


@contextlib.contextmanager
def beats(
    tell: Callable[[float], None],
    *,
    every: float = BEAT_SECONDS,
    wait: Callable[[float], bool] | None = None,
) -> Iterator[None]:
    """Call `tell` with the seconds so far, every so many, until the work inside ends.

    `wait` sleeps for some seconds and tells whether the work has ended; a test brings its own clock.
    """
    ended = threading.Event()
    wait = wait or ended.wait

    def beat() -> None:
        seconds = every
        while not wait(every):
            tell(seconds)
            seconds += every

    thread = threading.Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
