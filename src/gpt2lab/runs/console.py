"""The console of a run: lines that stay, one line that rewrites itself on a terminal, and beats of long work."""

from __future__ import annotations

import contextlib
import select
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

BEAT_SECONDS = 4.0
_WATCHED_SECONDS = 600.0  # for which somebody may watch a file from the start of a run
_SILENT_SECONDS = (5.0, 30.0)  # that a file may be without a line: while a run is young, and later
_PATIENCE_SECONDS = 0.25  # for output that has stopped: less than for a hang
_PART = 1024  # characters written at a time: a pipe that takes output has room for 4 kB
_INDENT = 15  # of what belongs to the line above, as the labels of a start's first lines


class Console:
    """Standard output; safe to use from several threads.

    A pipe that nobody reads and a terminal stopped by Ctrl+S would stop the program, whatever it holds at that moment:
    lines that they do not take are left out, and counted.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shown = 0  # characters of the line that will be rewritten
        self._left_out = 0  # lines, since the output stopped
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
            if not self._takes_output(0.0 if self._left_out else _PATIENCE_SECONDS):
                self._left_out += 1
                return
            if self._left_out:
                missing = (
                    f"(lines in log.txt only, because nobody took this output: {self._left_out:,})"
                )
                text = f"{missing}\n{text}"
                self._left_out = 0
            self._clear()
            self._write(text + "\n")

    def show(self, text: str) -> None:
        """Replace the rewriting line, on a terminal; nothing elsewhere.

        Raises: OSError.
        """
        if self._width is None:
            return
        with self._lock:
            if not self._takes_output(0.0):
                return
            text = text[: self._width - 1]
            sys.stdout.write("\r" + text.ljust(self._shown))
            self._shown = len(text)
            sys.stdout.flush()

    def clear(self) -> None:
        """Remove the rewriting line: what another program or stderr writes next begins a line.

        Raises: OSError.
        """
        with self._lock:
            if self._takes_output(0.0):
                self._clear()
                sys.stdout.flush()

    def _takes_output(self, patience: float) -> bool:
        """Wait until standard output takes some more, for so many seconds at most; tell whether it does."""
        try:
            return bool(select.select([], [sys.stdout], [], patience)[1])
        except ValueError:  # no file of the system, as in tests: nothing to wait for
            return True

    def _write(self, text: str) -> None:
        """Write text; what is left of it when the output stops in between is left out."""
        for begin in range(0, len(text), _PART):
            if not self._takes_output(_PATIENCE_SECONDS):
                self._left_out += 1
                return
            sys.stdout.write(text[begin : begin + _PART])
            sys.stdout.flush()

    def _clear(self) -> None:
        if self._shown:
            sys.stdout.write("\r" + " " * self._shown)
            sys.stdout.write("\r")
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
