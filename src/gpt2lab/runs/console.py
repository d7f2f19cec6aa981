"""The console of a run: lines that stay, one line that rewrites itself on a terminal, and beats of long work."""

from __future__ import annotations

import contextlib
import select
import shutil
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator

BEAT_SECONDS = 4.0
_WATCHED_SECONDS = 600.0  # for which somebody may watch a file from the start of a run
_SILENT_SECONDS = (5.0, 30.0)  # that a file may be without a line: while a run is young, and later
_CAPACITY = 2**20  # characters that wait for a reader: thousands of lines
_PATIENCE_SECONDS = 10.0  # at the end of a run, for output that has stopped
_PART = 1024  # characters written at a time: a pipe that takes output has room for 4 kB
_INDENT = 15  # of what belongs to the line above, as the labels of a start's first lines


class Console:
    """Standard output; safe to use from several threads.

    A pipe that nobody reads and a terminal stopped by Ctrl+S would stop the program, whatever it holds at that moment.
    So nothing waits for a reader: text waits in memory for one that is slow, and goes out with later lines. Lines that
    find no room there are left out, and counted.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shown = 0  # characters of the line that will be rewritten
        self._waiting: deque[str] = deque()  # parts that the output did not take yet
        self._left_out = 0  # lines, since there was room for one
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
        with self._lock:
            self._write_on()
            if sum(map(len, self._waiting)) + len(text) > _CAPACITY:
                self._left_out += 1
                return
            self._remove_shown()
            self._tell_missing()
            self._put(text + "\n")
            self._write_on()

    def show(self, text: str) -> None:
        """Replace the rewriting line, on a terminal; nothing elsewhere.

        Raises: OSError.
        """
        if self._width is None:
            return
        with self._lock:
            self._write_on()
            if self._waiting:
                return
            text = text[: self._width - 1]
            self._put("\r" + text.ljust(self._shown))
            self._shown = len(text)
            self._write_on()

    def close(self, patience: float | None = _PATIENCE_SECONDS) -> None:
        """Remove the rewriting line, and wait for a reader until it takes nothing for `patience` seconds; None: always.

        What another program or stderr writes next begins a line.

        Raises: OSError.
        """
        with self._lock:
            self._remove_shown()
            self._tell_missing()
            self._write_on(patience)
            self._waiting.clear()

    def _put(self, text: str) -> None:
        self._waiting.extend(text[i : i + _PART] for i in range(0, len(text), _PART))

    def _write_on(self, patience: float | None = 0.0) -> None:
        """Write what waits, until the output takes nothing for `patience` seconds; None: until all is written."""
        while self._waiting and self._takes_output(patience):
            sys.stdout.write(self._waiting.popleft())
            sys.stdout.flush()

    def _takes_output(self, patience: float | None) -> bool:
        try:
            return bool(select.select([], [sys.stdout], [], patience)[1])
        except ValueError:  # no file of the system, as in tests: nothing to wait for
            return True

    def _tell_missing(self) -> None:
        if self._left_out:
            missing = f"lines that are in log.txt only: {self._left_out:,}; nobody took them here"
            self._put(f"({missing})\n")
            self._left_out = 0

    def _remove_shown(self) -> None:
        """Remove the rewriting line; a carriage return must begin a write, else it is escaped (commands/entry.py)."""
        if self._shown:
            self._put("\r" + " " * self._shown)
            self._put("\r")
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
