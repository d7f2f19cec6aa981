"""Write a run's events to metrics.jsonl (the truth), console and log.txt.

Only rank 0 writes; the other ranks hold a MetricsLogger without a folder. A full disk does not end a run: lines that
metrics.jsonl cannot take stay in memory until it can, and no checkpoint is written before.
"""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from time import monotonic
from typing import IO, Any

from gpt2lab.errors import SaveError
from gpt2lab.files import regular
from gpt2lab.runs.console import WATCHED_SECONDS, Console, beats, doing
from gpt2lab.runs.events import METRICS, encode_line, finite, parse_line
from gpt2lab.runs.folder import LOG

# Without a line in a file: while somebody may be watching it, and later.
_SILENT_SECONDS = (5.0, 30.0)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors after which a write is tried again later. A kernel makes a damaged file system read-only until it is repaired.
_RETRIED = (*_FULL, errno.EIO, errno.EROFS)
_BLOCK = 1 << 20


class MetricsLogger:
    """Writes a run's events to every place that shows them."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        attempt: int,
        recorded: Callable[[dict[str, Any], object], None] = lambda event, result: None,
    ) -> None:
        """Open the files of `run_dir` (None: write nothing). `recorded` is called with every event once it is written,
        and with what was measured, see `event`.
        """
        self._attempt, self._recorded = attempt, recorded
        self.newest_step = 0  # of the newest event
        self._console: Console | None = Console()
        self._lock = threading.RLock()  # of say: long work is told of by another thread
        self._metrics: FileIO | None = None
        self._held_back = bytearray()  # lines that the disk has no room for
        self._is_full = False
        self._flushed = 0  # bytes of metrics.jsonl that are on the disk
        # After a flush that failed the kernel may have given up on what it could not write.
        self._last_flush_failed = False
        self._log: IO[str] | None = None
        self._began = self._last_line = monotonic()
        if run_dir is None:
            return
        _end_last_line(run_dir / METRICS)
        self._metrics = FileIO(run_dir / METRICS, "ab", opener=regular)
        self._flushed = self._metrics.tell()
        self._log = open(  # noqa: SIM115
            run_dir / LOG, "a", encoding="utf-8", errors="backslashreplace", opener=regular
        )

    def event(self, event: str, step: int, /, *, result: object = None, **fields: Any) -> None:
        """Append one event to metrics.jsonl; `result`: what the event's numbers were taken from, for extensions.

        Raises: SaveError if metrics.jsonl cannot be written for another reason than a disk that is full or fails.
        """
        if self._metrics is None:
            return
        values = {name: finite(value) for name, value in fields.items()}
        line = {
            "event": event,
            "time": time.time(),
            "attempt": self._attempt,
            "step": step,
            **values,
        }
        self._held_back += encode_line(line)
        self.newest_step = step
        self.catch_up()
        self._recorded(line, result)

    def catch_up(self) -> str | None:
        """Append the lines held back to metrics.jsonl; return why not if the disk is full or fails.

        Raises: SaveError for any other error.
        """
        if self._metrics is None:
            return None
        try:
            while self._held_back:
                del self._held_back[: self._metrics.write(self._held_back)]
        except OSError as error:
            problem = f"{self._metrics.name}: {error.strerror}"
            if error.errno not in _RETRIED:
                raise SaveError(f"{problem}; repair it and resume") from error
            if not self._is_full:
                self.say(f"warning: {problem}; training continues and keeps its events in memory")
            self._is_full = True
            return problem
        if self._is_full:
            self.say(f"{self._metrics.name}: written again, nothing is missing")
        self._is_full = False
        return None

    def flush(self) -> str | None:
        """Append the lines held back and wait until all are on the disk; return why not if the disk does not take them.

        A checkpoint rests on the events before it: a power cut that spares it must spare them.

        Raises: SaveError, see `catch_up`.
        """
        if (problem := self.catch_up()) is not None or self._metrics is None:
            return problem
        for _ in range(2):
            try:
                if self._last_flush_failed:
                    self._write_again()
                os.fsync(self._metrics.fileno())
            except OSError as error:
                problem = f"{self._metrics.name}: {error.strerror}"
                if not self._last_flush_failed:
                    self.say(f"warning: {problem}; its last events are written again")
                self._last_flush_failed = True
            else:
                self._flushed = os.fstat(self._metrics.fileno()).st_size
                self._last_flush_failed = False
                return None
        return problem

    def _write_again(self) -> None:
        """Write what was not flushed a second time: after an error the kernel takes it for written."""
        assert self._metrics is not None
        # Another one than the first, which only appends.
        with open(self._metrics.name, "rb+", buffering=0, opener=regular) as file:
            file.seek(self._flushed)
            while block := os.pread(file.fileno(), _BLOCK, file.tell()):
                file.write(block)

    def say(
        self, text: str, *, short: str | None = None, on_console: bool = True, in_log: bool = True
    ) -> None:
        """Print text and append it to log.txt; an error of either does not end a run.

        `short`: what a terminal shows that is too narrow for the text.
        """
        if self._log is None:
            return
        with self._lock:
            if on_console:
                self._last_line = monotonic()
                self._on_console(lambda console: console.print(text, short))
            if in_log:
                with contextlib.suppress(OSError):
                    self._log.write(text + "\n")
                    self._log.flush()

    def show(self, text: str) -> None:
        """Show text on a terminal until the next line; nothing elsewhere."""
        if self._log is not None:
            self._on_console(lambda console: console.show(text))

    def log_if_quiet(self, text: str, *, step_seconds: float) -> None:
        """Say text where no line came for long; nothing on a terminal, whose progress line rewrites itself."""
        on_terminal = self._console is not None and self._console.is_terminal
        now = monotonic()
        # After another step, the last line would be too old.
        longest = _SILENT_SECONDS[now - self._began >= WATCHED_SECONDS]
        if not on_terminal and now - self._last_line + step_seconds > longest:
            self.say(text)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Say what will take a while, and how far it is: in one line of a terminal, ever more rarely in log.txt."""
        if self._log is None:
            yield
            return
        on_terminal = self._console is not None and self._console.is_terminal
        told = 0.0

        def tell(seconds: float) -> None:
            nonlocal told
            line = task.line(seconds)
            if on_terminal:
                self.show(line)
            elif seconds >= 2 * told:
                self.say(line)
                told = seconds
            elif monotonic() - self._began < WATCHED_SECONDS:  # log.txt stays short
                self.say(line, in_log=False)

        self.show(text) if on_terminal else self.say(text)
        with doing(text) as task, beats(tell):
            yield

    def _on_console(self, act: Callable[[Console], None]) -> None:
        if self._console is None:
            return
        try:
            act(self._console)
        except OSError as error:
            if error.errno not in _FULL:  # `... | head`, a closed terminal
                self._drop_console()

    def _drop_console(self) -> None:
        """Discard later output: the interpreter would fail on it when it ends."""
        self._console = None
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def warn(self, text: str, step: int) -> None:
        """Show a warning and record it as an event."""
        self.say(f"warning: {text}")
        self.event("warning", step, message=text)

    def close(self) -> None:
        """Flush and close every file."""
        with contextlib.suppress(SaveError):
            self.flush()
        if self._held_back:
            lost = self._held_back.count(b"\n")
            self.say(
                f"warning: the last {lost:,} events are not in {METRICS}: its disk is full or fails"
            )
            self._held_back.clear()
        if self._console and self._log is not None:
            try:
                self._console.close()
            except OSError:
                self._drop_console()
        for sink in (self._metrics, self._log):
            if sink is not None:
                with contextlib.suppress(OSError):  # a full disk; the metrics were flushed before
                    sink.close()
        self._metrics = self._log = None


def _end_last_line(path: Path) -> None:
    """Remove a torn last line, left by a writer that was killed; a complete one lacks at most its newline."""
    if not path.exists():
        return
    with open(path, "rb+", opener=regular) as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:  # backwards: the log may be long
            begin = file.seek(max(0, end - _BLOCK))
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        file.seek(end)
        try:
            parse_line(file.read(min(size - end, _BLOCK)))
        except ValueError:
            file.truncate(end)
        else:
            file.write(b"\n")
