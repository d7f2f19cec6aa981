"""The console of a run: printed lines, one progress line that is rewritten on a terminal, notices during long work.

A pipe that nobody reads, or a terminal stopped by Ctrl+S, blocks a program that writes to it. So text for standard
output is written only as far as its reader takes it, and for standard error after `never_wait_for_stderr`.
"""

import atexit
import contextlib
import select
import shutil
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import length_hint
from time import monotonic
from typing import TextIO, TypeVar

from gpt2lab import fmt

T = TypeVar("T")

BEAT_SECONDS = 4.0
WATCHED_SECONDS = 600.0  # after the start of a run, in which somebody may be watching the file
_CAPACITY = 2**20  # characters of the buffer: thousands of lines
_PATIENCE_SECONDS = 10.0  # at the end of a run, for a reader that has stopped
_PART = 1024  # characters written at a time: a pipe that is ready has room for 4 kB
_INDENT = 15  # of continued lines: the width of the labels at a start


class Output:
    """A stream that is written without blocking; safe to use from several threads.

    Text for a slow reader is buffered. Text that the buffer has no room for is dropped, and its lines are counted.
    """

    def __init__(self, stream: TextIO, missing: str) -> None:
        """`missing`: what to print before the number of dropped lines."""
        self.lock = threading.RLock()
        self._stream, self._missing = stream, missing
        self._write, self._flush = stream.write, stream.flush  # they may be replaced later
        self.waiting: deque[str] = deque()  # the buffer: parts that are not written yet
        self._dropped = 0  # lines, since the buffer was full

    def has_room(self, text: str) -> bool:
        """Write what is buffered, and tell whether the buffer has room for a text; if not, count its lines as dropped.

        Raises: OSError.
        """
        self.write_on()
        if sum(map(len, self.waiting)) + len(text) > _CAPACITY:
            self._dropped += max(1, text.count("\n"))
            return False
        return True

    def put(self, text: str) -> None:
        """Buffer a text. A carriage return is kept only at its start, elsewhere it is escaped (commands/entry.py)."""
        self.waiting.extend(text[i : i + _PART] for i in range(0, len(text), _PART))

    def report_dropped(self) -> None:
        """Buffer a line with the number of dropped lines."""
        if self._dropped:
            self.put(f"({self._missing}: {self._dropped:,}; reader too slow)\n")
            self._dropped = 0

    def write_on(self, patience: float | None = 0.0) -> None:
        """Write what is buffered, until the reader takes nothing for `patience` seconds; None: until all is written.

        Raises: OSError.
        """
        while self.waiting and self._takes_output(patience):
            self._write(self.waiting.popleft())
            self._flush()

    def close(self, patience: float | None) -> None:
        """Write what is buffered, as `write_on` does, and discard the rest.

        Raises: OSError.
        """
        with self.lock:
            self.report_dropped()
            self.write_on(patience)
            self.waiting.clear()

    def _takes_output(self, patience: float | None) -> bool:
        try:
            return bool(select.select([], [self._stream], [], patience)[1])
        except ValueError:  # not a file of the system, as in tests: it never blocks
            return True


def say(text: str = "") -> None:
    """Print a line of progress or a warning to standard error; standard output is for the answer of a command."""
    print(text, file=sys.stderr, flush=True)


def never_wait_for_stderr() -> None:
    """Write standard error without blocking and without failing, from here to the end of the process."""
    stream = sys.stderr
    if not stream or hasattr(stream, "finish"):  # closed, or replaced before
        return
    output = Output(stream, "lines of warnings dropped")

    def write(text: str) -> int:
        with output.lock, contextlib.suppress(OSError):
            if output.has_room(text):
                output.report_dropped()
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
    """Write the rest of standard error, as an ordinary exit does; call it before `os._exit`."""
    getattr(sys.stderr, "finish", sys.stderr.flush)()


class Console:
    """Standard output; safe to use from several threads."""

    def __init__(self) -> None:
        self._output = Output(sys.stdout, "lines that are in log.txt only")
        self._shown = 0  # characters of the progress line
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    @property
    def is_terminal(self) -> bool:
        """Tell whether standard output is a terminal."""
        return self._width is not None

    def print(self, text: str, short: str | None = None) -> None:
        """Print text; on a terminal that is too narrow for it, print `short`, or wrap it.

        A line with a command is not wrapped, so that it can be copied.

        Raises: OSError.
        """
        if self._width is not None and short is not None and len(text) > self._width:
            text = short
        text = text if self._width is None else wrap(text, self._width)
        with self._output.lock:
            if self._output.has_room(text + "\n"):
                self._remove_shown()
                self._output.report_dropped()
                self._output.put(text + "\n")
                self._output.write_on()

    def show(self, text: str) -> None:
        """Replace the progress line of a terminal; do nothing elsewhere.

        Raises: OSError.
        """
        if self._width is None:
            return
        with self._output.lock:
            self._output.write_on()
            if self._output.waiting:
                return
            text = text[: self._width - 1]
            self._output.put("\r" + text.ljust(self._shown))
            self._shown = len(text)
            self._output.write_on()

    def close(self, patience: float | None = _PATIENCE_SECONDS) -> None:
        """Remove the progress line and write what is buffered, as `write_on` does. The next output begins a line.

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


def wrap(text: str, width: int) -> str:
    """Wrap text to `width` columns, except longer words and lines with a command."""
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(
        line if len(line) <= width or " --" in line else wrapper.fill(line)
        for line in text.split("\n")
    )


# -- what a command is doing ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Task:
    """Work that takes a while, and how far it is; `total` 0: nobody knows how much there is."""

    what: str
    done: int = 0
    total: int = 0
    unit: str = ""
    began: float = field(default_factory=monotonic)

    def line(self, seconds: float) -> str:
        """Return the line after so many seconds: `validation loss: 120 of 1,000 batches, 14s left`."""
        if self.done and self.total:
            left = fmt.duration(seconds * (self.total / self.done - 1))
            return f"{self.what}: {self.done:,} of {self.total:,} {self.unit}, {left} left"
        return f"{self.what}: {seconds:.0f} s so far"


TASKS: list[Task] = []  # of this process, the innermost last


@contextlib.contextmanager
def doing(what: str) -> Iterator[Task]:
    """Name what the block does; empty: it waits for people or prints by itself."""
    task = Task(what)
    TASKS.append(task)
    try:
        yield task
    finally:
        TASKS.remove(task)


def counted(items: Iterable[T], unit: str, total: int = 0) -> Iterator[T]:
    """Yield items, and count them in the innermost task; `total`: how many may come, if they have no length."""
    total = total or length_hint(items)
    for done, item in enumerate(items):
        if TASKS:
            TASKS[-1].done, TASKS[-1].total, TASKS[-1].unit = done, total, unit
        yield item


@contextlib.contextmanager
def beats(tell: Callable[[float], None], *, every: float = BEAT_SECONDS) -> Iterator[None]:
    """Call `tell` with the seconds so far, every `every` seconds, until the block ends."""
    ended, began = threading.Event(), monotonic()

    def beat() -> None:
        while not ended.wait(every):
            tell(monotonic() - began)

    thread = threading.Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
