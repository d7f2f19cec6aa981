"""What every process is doing right now, and what is said when one of them does nothing any more. No torch.

Each process tells its phase in a small file of the run's folder and watches itself with a thread. When its phase lasts
too long it reads the others' files, names the one that all wait for, prints its own stacks, and ends: a hang becomes a
crash, which a restart cures.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "heartbeat"
EXIT_CODE = 78
_BEAT_SECONDS = 2.0
_FIRST_TIME = 3  # a phase seen for the first time may compile, read from a cold disk, ...
_SLOWER = 10  # a phase is given this many times the longest that it has taken

# In the order of a step: who is furthest behind is the one that the others wait for.
PHASES = ("reading data", "agreeing", "training", "comparing weights", "measuring", "saving")


class Heartbeat:
    """The phase of this process, and the watch over it."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        hang_seconds: float,
        tell: Callable[[str], None] = lambda report: None,
    ) -> None:
        """`hang_seconds` 0: no watch. `tell` is given the report before the process ends."""
        self._folder, self._rank, self._hang_seconds, self._tell = (
            run_dir / FOLDER,
            rank,
            hang_seconds,
            tell,
        )
        # One object, so that the watching thread never sees one phase with another's age.
        self._now = (0, PHASES[0], time.monotonic())
        self._longest: dict[str, float] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if hang_seconds > 0:
            with suppress(OSError):
                self._folder.mkdir(exist_ok=True)
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
            self._thread.start()

    def enter(self, phase: str, step: int) -> None:
        """Begin a phase of the step under way."""
        now = time.monotonic()
        _, before, since = self._now
        self._longest[before] = max(now - since, self._longest.get(before, 0.0))
        self._now = (step, phase, now)

    def beat(self) -> None:
        """Say that a long phase goes on: between the batches of an evaluation."""
        step, phase, _ = self._now
        self._now = (step, phase, time.monotonic())

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        if self._thread:
            self._thread.join()
            with suppress(OSError):
                self._path(self._rank).unlink()

    def limit_seconds(self, phase: str) -> float:
        """Return how long a phase may last."""
        longest = self._longest.get(phase)
        if longest is None:
            return _FIRST_TIME * self._hang_seconds
        return max(self._hang_seconds, _SLOWER * longest)

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:04d}.json"

    def _watch(self) -> None:
        pause = min(_BEAT_SECONDS, self._hang_seconds / 4)
        while not self._closed.wait(pause):
            step, phase, since = seen = self._now
            lasts = time.monotonic() - since
            with suppress(OSError):
                self._write(step, phase, lasts)
            # What was seen may be over: writing takes its time on a slow disk.
            if lasts > self.limit_seconds(phase) and seen is self._now:
                report = self.report(pause)
                print(f"error: process {self._rank}: {report}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
                self._tell(report)
                os._exit(EXIT_CODE)

    def _write(self, step: int, phase: str, lasts: float) -> None:
        path = self._path(self._rank)
        told = {
            "rank": self._rank,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "step": step,
            "phase": phase,
            "seconds": round(lasts, 1),
            "time": time.time(),
        }
        path.with_suffix(".tmp").write_text(json.dumps(told))
        os.replace(path.with_suffix(".tmp"), path)

    def report(self, pause: float) -> str:
        """Name the processes that the others wait for: silent ones, else those furthest behind."""
        beats = read_beats(self._folder)
        silent = [beat for beat in beats if time.time() - beat["time"] > 2 * pause + 0.5]
        behind = min(((beat["step"], _place(beat["phase"])) for beat in beats), default=None)
        blamed = silent or [b for b in beats if (b["step"], _place(b["phase"])) == behind]
        told = "; ".join(
            f"process {beat['rank']} on {beat['host']} "
            + (f"silent for {time.time() - beat['time']:.0f} s, last seen " if silent else "")
            + f"{beat['phase']} of step {beat['step']} for {beat['seconds']:.0f} s"
            for beat in blamed
        )
        step, phase, since = self._now
        own = f"{phase} of step {step} for {time.monotonic() - since:.0f} s"
        return f"hangs in {own}; all wait for: {told or 'nobody known'}; go on with --resume latest"


def read_beats(folder: Path) -> list[dict[str, Any]]:
    """Return what the processes told last, by rank."""
    beats = []
    for path in sorted(folder.glob("rank_*.json")):
        with suppress(OSError, ValueError):
            beats.append(json.loads(path.read_text()))
    return beats


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
