"""A running start's place in time: so far, still to go, on track or not. No torch."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.config.schema import Config
from gpt2lab.planner.interval import Interval
from gpt2lab.planner.progress import Progress, frequencies
from gpt2lab.runs import history
from gpt2lab.runs.history import spent_seconds

_LINE_EVERY = 60.0  # seconds


def process_began() -> float:
    """Return the reading of the monotonic clock at which this process started; now where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.monotonic() - age


class RunClock:
    """Counts from the beginning of this start; knows the pace, --max_hours and the forecast."""

    def __init__(
        self,
        config: Config,
        *,
        last_step: int,
        began: float,
        expected_seconds: float | None,
    ) -> None:
        """`began`: monotonic clock; `expected_seconds`: upper bound of the forecast for the whole run."""
        self.progress = Progress(last_step=last_step, frequencies=frequencies(config))
        self._last_step = last_step
        self._began, self._expected = began, expected_seconds
        hours = config.length.max_hours
        self._limit = None if hours is None else 3600 * hours
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
