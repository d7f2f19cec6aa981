"""A running start's place in time: so far, still to go, on track or not, when to stop. No torch."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from gpt2lab import fmt, history
from gpt2lab.config import Config
from gpt2lab.interval import Interval
from gpt2lab.planning.remaining import spent_seconds
from gpt2lab.progress import Progress, frequencies, is_due

OUT_OF_TIME = "max_hours"  # the reason of a stop by --max_hours
_LEAVING = 5.0  # seconds to close files and leave the process group
_SAVE_BYTES_PER_SECOND = 1e8  # assumed before the first save was measured
_LINE_EVERY = 60.0  # seconds


class RunClock:
    """Counts from the beginning of this start; knows the pace, --max_hours and the forecast."""

    def __init__(
        self,
        config: Config,
        *,
        last_step: int,
        began: float,
        checkpoint_bytes: int,
        expected_seconds: float | None,
    ) -> None:
        """`began`: monotonic clock; `expected_seconds`: upper bound of the forecast for the whole run."""
        self.progress = Progress(last_step=last_step, frequencies=frequencies(config))
        self._frequencies, self._last_step = frequencies(config), last_step
        self._began, self._expected = began, expected_seconds
        hours = config.length.max_hours
        self._limit = None if hours is None else 3600 * hours
        self._save = checkpoint_bytes / _SAVE_BYTES_PER_SECOND
        self._elapsed_before = 0.0
        self._said = 0.0

    def take_over(self, run_dir: Path, *, same_hardware: bool) -> None:
        """Go on from the starts before: their time counts, and on the same hardware also their pace."""
        events = history.read_events(run_dir)
        self._elapsed_before = spent_seconds(events)
        if same_hardware:
            steps = history.current(events, "step").values()
            others = [e for e in events if e["event"] not in ("step", "done") and e.get("seconds")]
            self.progress.inherit(
                [event["step_seconds"] for event in steps],
                [(event["event"], event["seconds"]) for event in others],
            )

    def elapsed(self) -> float:
        """Return the seconds of this start so far."""
        return time.monotonic() - self._began

    def is_on_track(self, left: Interval | None) -> bool | None:
        """Tell whether the run ends in time: within --max_hours by its upper bound, else as it was foretold."""
        if left is None:
            return None
        if self._limit is not None:
            return self.elapsed() + left.high <= self._limit
        if self._expected is None:
            return None
        return self._elapsed_before + self.elapsed() + left.value <= self._expected

    def is_out_of_time(self, step: int) -> bool:
        """Tell whether one more step, with what is due around it, and a save would end after --max_hours."""
        if self._limit is None or step >= self._last_step:
            return False
        ahead = self.progress.step_seconds() or self.elapsed() / max(1, step)
        for kind, freq in self._frequencies.items():
            due = [is_due(n, freq, self._last_step) for n in (step, step + 1)]
            if kind != "checkpoint":
                ahead += sum(due) * self.progress.slowest_event(kind)
        save = self.progress.slowest_event("checkpoint") or self._save
        leaving = min(_LEAVING, 0.1 * self._limit)
        return self.elapsed() + ahead + 1.5 * save + leaving > self._limit

    def line(self, step: int, left: Interval | None) -> str | None:
        """Write where the run stands, at most once a minute."""
        now = self.elapsed()
        if left is None or now < self._said + _LINE_EVERY:
            return None
        self._said = now
        on_track = self.is_on_track(left)
        track = "" if on_track is None else f" | {'on track' if on_track else 'BEHIND'}"
        pace = self.progress.step_seconds() or math.inf
        return (
            f"progress {step / self._last_step:.1%} | elapsed {fmt.duration(self._elapsed_before + now)} | "
            f"remaining {fmt.duration(left.value)} ({fmt.duration(left.low)} ... {fmt.duration(left.high)}) | "
            f"{3600 / pace:,.0f} steps/h{track}"
        )

    def fields(self, left: Interval | None) -> dict[str, Any]:
        """Return what a step's event says of time."""
        return {
            "elapsed_seconds": self.elapsed(),
            "remaining_seconds": left.value if left else None,
            "on_track": self.is_on_track(left),
        }
