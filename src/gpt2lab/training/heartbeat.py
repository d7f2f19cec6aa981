"""What every rank is doing, and what happens when one of them hangs. No torch.

Each rank writes its phase to a small file in the run's folder and watches itself with a thread. When a phase lasts too
long, the thread reads the other ranks' files, names the rank that all wait for, prints the stacks, saves the last
complete step and ends the process: a hang becomes a crash, after which a restart continues.

Time in which this process itself was stopped (SIGSTOP, Ctrl+Z, a frozen container or machine) is no hang. The
watching thread misses its beats then, so each interval between beats counts at most twice its normal length.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpt2lab.errors import GPT2LabError
from gpt2lab.files import COUNT, NUMBER, STRING, JsonFile, regular
from gpt2lab.runs.console import finish_stderr

FOLDER = "heartbeat"
EXIT_CODE = 78
_BEAT_SECONDS = 2.0
_FIRST_TIME = 3  # times hang_seconds, for a phase's first time: it may compile
_SAY_SECONDS = 5.0  # to wait for a stderr that hangs, after the rescue
_SLOWER = 10  # a phase is given this many times the longest that it has taken

# In the order of a step: the others wait for the rank that is furthest behind.
PHASES = ("reading data", "agreeing", "training", "comparing weights", "measuring", "saving")
_BEAT = {
    **dict.fromkeys(("rank", "step"), COUNT),
    **dict.fromkeys(("host", "phase"), STRING),
    **dict.fromkeys(("seconds", "time"), NUMBER),
}


class Heartbeat:
    """The phase of this rank, and the thread that watches it."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        hang_seconds: float,
        tell: Callable[[str], None] = lambda report: None,
    ) -> None:
        """`hang_seconds` 0: no watch. `tell` receives the report before the process ends."""
        # Set by the loop: saves the last complete step, in another thread than the one that hangs.
        self.rescue: Callable[[], bool] = lambda: False
        # Set by the loop: tells that the launcher, which asked to stop, will soon kill this process.
        self.is_out_of_time: Callable[[], bool] = lambda: False
        self._folder, self._rank, self._world_size = run_dir / FOLDER, rank, world_size
        self._hang_seconds, self._tell = hang_seconds, tell
        self._pause = min(_BEAT_SECONDS, hang_seconds / 4)
        # Each is one object: a thread that reads it never sees one phase with another's age.
        self._last_beat = (time.monotonic(), 0.0)  # when, and what the clock said
        self._now = (0, PHASES[0], self._clock())
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
        now = self._clock()
        _, before, since = self._now
        self._longest[before] = max(now - since, self._longest.get(before, 0.0))
        self._now = (step, phase, now)

    def expect(self, phase: str, seconds: float) -> None:
        """Allow a phase to last so long, although it has not yet."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    @property
    def doing(self) -> tuple[str, int]:
        """The phase of this rank and its step."""
        step, phase, _ = self._now
        return phase, step

    def beat(self) -> None:
        """Report that a long phase still makes progress: between the batches of an evaluation."""
        step, phase, _ = self._now
        self._now = (step, phase, self._clock())

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        if self._thread:
            self._thread.join()
            with suppress(OSError):
                self._path(self._rank).unlink()

    def limit_seconds(self, phase: str) -> float:
        """Return how long a phase may last."""
        if phase not in self._longest:
            return _FIRST_TIME * self._hang_seconds
        return max(self._hang_seconds, _SLOWER * self._longest[phase])

    def _clock(self) -> float:
        """Return the seconds of this watch; they stand still while the process is stopped."""
        at, said = self._last_beat
        return said + min(time.monotonic() - at, 2 * self._pause)

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:04d}.json"

    def _watch(self) -> None:
        while not self._closed.wait(self._pause):
            self._last_beat = (time.monotonic(), self._clock())
            step, phase, since = seen = self._now
            lasts = self._clock() - since
            with suppress(OSError):
                self._write(step, phase, lasts)
            is_late = lasts > self.limit_seconds(phase)
            is_late |= phase == "training" and self.is_out_of_time()
            # The phase may have ended: writing takes long on a slow disk.
            if is_late and seen is self._now:
                report = self.report()
                said = _say(f"error: rank {self._rank}: {report}\n{stacks()}")
                if self._has_rescued():
                    report += "; the last complete step is saved"
                self._tell(report)
                if said.ident:
                    said.join(_SAY_SECONDS)
                os._exit(EXIT_CODE)

    def _has_rescued(self) -> bool:
        """Try to rescue for as long as a save may last: the disk or the GPU may hang as well."""
        saved: list[bool] = []
        thread = threading.Thread(target=lambda: saved.append(self.rescue()), daemon=True)
        with suppress(RuntimeError):  # no room for a thread
            thread.start()
            thread.join(self.limit_seconds("saving"))
        return saved == [True]

    def _write(self, step: int, phase: str, lasts: float) -> None:
        path = self._path(self._rank)
        beat = {
            "rank": self._rank,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "step": step,
            "phase": phase,
            "seconds": round(lasts, 1),
            "time": time.time(),
        }
        with open(path.with_suffix(".tmp"), "w", opener=regular) as file:
            json.dump(beat, file)
        os.replace(path.with_suffix(".tmp"), path)

    def report(self) -> str:
        """Name the ranks that the others wait for: silent ones, else those furthest behind."""
        beats: list[dict[str, Any]] = []
        for rank in range(self._world_size):  # an earlier start may have had more
            file = JsonFile(self._path(rank), GPT2LabError)
            with suppress(GPT2LabError):
                beat = file.read()
                file.check(beat, _BEAT)
                beats.append(beat)
        silent = [beat for beat in beats if time.time() - beat["time"] > 2 * self._pause + 0.5]
        behind = min(map(_place, beats), default=None)
        blamed = silent or [beat for beat in beats if _place(beat) == behind]
        named = "; ".join(
            f"rank {beat['rank']} on {beat['host']} "
            + (f"silent for {time.time() - beat['time']:.0f} s, last seen " if silent else "")
            + f"{beat['phase']} of step {beat['step']} for {beat['seconds']:.0f} s"
            for beat in blamed
        )
        step, phase, since = self._now
        own = f"{phase} of step {step} for {self._clock() - since:.0f} s"
        return f"hangs in {own}; all wait for: {named or 'an unknown rank'}; continue with --resume latest"


def stacks() -> str:
    """Return where each thread is, its innermost call first. No file is read, as for lines of source: it may hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, innermost in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}, innermost call first:")
        for frame, line in traceback.walk_stack(innermost):
            lines.append(f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}")
    return "\n".join(lines)


def _say(text: str) -> threading.Thread:
    """Write to stderr in a separate thread: it may be a pipe without a reader."""

    def write() -> None:
        print(text, file=sys.stderr, flush=True)
        finish_stderr()

    thread = threading.Thread(target=write, name="last words", daemon=True)
    with suppress(RuntimeError):  # no room for it
        thread.start()
    return thread


def _place(beat: dict[str, Any]) -> tuple[int, int]:
    phase = beat["phase"]
    return beat["step"], PHASES.index(phase) if phase in PHASES else len(PHASES)
