"""When things are due, and how long the rest will take: steps by their recent pace, events by their own cost."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence

from gpt2lab.config.schema import Config
from gpt2lab.planner.interval import Interval, total

_WARM_UP = 2  # first steps of a start: compiling, page faults, allocator
_WINDOW_SECONDS, _FEWEST_STEPS, _MOST_STEPS = 600.0, 200, 3000  # steps whose pace counts
_OUTLIER = 5.0  # a step longer than this many medians counts as that: a sum needs the mean, but not a stall's
_OWN_PACE_FROM = 20  # steps from which an earlier start's pace is forgotten
_DRIFT = 0.01  # what a pace still moves by, relative
_UNKNOWN = 0.3  # relative error of a pace of very few steps
_EVENTS_COUNT = 10  # newest events of a kind that count
_EVENT_SPREAD = 0.1  # what events may be off by, relative


def count_due(step: int, freq: int, last: int) -> int:
    """Count how often it will still happen after `step`, the last step included."""
    if step >= last:
        return 0
    regular = (last // freq - step // freq) if freq > 0 else 0
    return regular + (0 if freq > 0 and last % freq == 0 else 1)


def frequencies(config: Config) -> dict[str, int]:
    """Return how often each kind of event comes, in steps; the ETA and the estimator count with the same."""
    freqs = {
        "eval": config.eval.eval_freq,
        "sample": config.eval.sample_freq,
        "checkpoint": config.checkpoint.checkpoint_freq,
    }
    if config.eval.hellaswag_path is not None:
        freqs["hellaswag"] = config.eval.hellaswag_freq
    return freqs


class Progress:
    """Seconds left, knowing the evaluations, samples and checkpoints that are still to come."""

    def __init__(self, *, last_step: int, frequencies: dict[str, int]) -> None:
        """`frequencies`: steps between events of each kind, e.g. {"eval": 250}; 0 = only after the last step."""
        self.last_step, self._frequencies = last_step, frequencies
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._seen = 0
        self._events: dict[str, list[float]] = {kind: [] for kind in frequencies}
        self._inherited: list[float] = []
        self._pace: Interval | None = None
        self._stale_from = 0

    def inherit(self, steps: Sequence[float], events: Sequence[tuple[str, float]]) -> None:
        """Take over what an earlier start on the same hardware took, until this one has a pace of its own."""
        self._inherited = list(steps)[_WARM_UP:][-_MOST_STEPS:]
        for kind, seconds in events:
            self.record_event(kind, seconds)

    def record_step(self, seconds: float) -> None:
        """Note one step of this start."""
        self._seen += 1
        if self._seen > _WARM_UP:
            self._steps.append(seconds)

    def record_event(self, kind: str, seconds: float) -> None:
        """Note what one event took."""
        if kind in self._events:
            self._events[kind].append(seconds)

    def step_seconds(self) -> float | None:
        """Return the recent mean step, single outliers clipped."""
        pace = self.pace()
        return pace.value if pace else None

    def pace(self) -> Interval | None:
        """Return the recent mean step with its 80 % interval, or None before there is one."""
        if self._seen >= self._stale_from:
            self._pace = self._measure_pace()
            # Sorting thousands of steps after each of them would cost more than a small step.
            self._stale_from = self._seen + 1 + len(self._steps) // 50
        return self._pace

    def stop_seconds(self, *, assumed_save: float = 0.0) -> float:
        """Return how long a stop may still take: one slow step and the last save, half as much again.

        `assumed_save` stands in for the save before there was one.
        """
        steps = sorted(itertools.islice(reversed(self._steps), 100))
        step = steps[round(0.95 * (len(steps) - 1))] if steps else 0.0
        saves = self._events.get("checkpoint", [])
        return 1.5 * (step + (saves[-1] if saves else assumed_save))

    def remaining(self, step: int) -> float | None:
        """Return the seconds left after `step`, or None before there is a pace to go by."""
        left = self.remaining_interval(step)
        return left.value if left else None

    def remaining_interval(self, step: int) -> Interval | None:
        """Return the seconds left after `step` with their 80 % interval."""
        pace = self.pace()
        if pace is None:
            return None
        events = self.events_left(step)
        around = _EVENT_SPREAD * events
        parts = [
            pace.scaled(self.last_step - step),
            Interval(events, max(0.0, events - around), events + around),
        ]
        return total(parts)

    def events_left(self, step: int) -> float:
        """Return the seconds of the evaluations, samples and checkpoints still to come after `step`."""
        return sum(
            statistics.fmean(seconds[-_EVENTS_COUNT:])
            * count_due(step, self._frequencies[kind], self.last_step)
            for kind, seconds in self._events.items()
            if seconds
        )

    def _measure_pace(self) -> Interval | None:
        mine = len(self._steps) >= _OWN_PACE_FROM
        steps = _recent(self._steps if mine else [*self._inherited, *self._steps])
        if not steps:
            return None
        ceiling = _OUTLIER * statistics.median(steps)
        clipped = [min(seconds, ceiling) for seconds in steps]
        mean = statistics.fmean(clipped)
        return Interval.log_normal(mean, math.hypot(_error_of_mean(clipped), _DRIFT))


def _recent(steps: Sequence[float]) -> list[float]:
    """Return the last steps: those of ten minutes, but at least 200."""
    recent: list[float] = []
    seconds = 0.0
    for taken in reversed(steps):
        if len(recent) >= _FEWEST_STEPS and seconds >= _WINDOW_SECONDS:
            break
        recent.append(taken)
        seconds += taken
    return recent


def _error_of_mean(steps: Sequence[float]) -> float:
    """Return the relative standard error of a mean of neighbours that are not independent: by blocks of them."""
    mean = statistics.fmean(steps)
    block = max(1, min(50, len(steps) // 8))
    blocks = [
        statistics.fmean(steps[i : i + block]) for i in range(0, len(steps) - block + 1, block)
    ]
    if len(blocks) < 2 or mean <= 0:
        return _UNKNOWN
    return statistics.stdev(blocks) / math.sqrt(len(blocks)) / mean
