"""The pace of a run that has begun: how fast its steps are, what is left, and whether it ends in time. No torch.

Steps count by their recent pace, evaluations, samples and checkpoints by their own cost. The planner predicts before a
run; this measures the run itself.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import fmt
from gpt2lab.config.derived import count_due, count_saves, frequencies
from gpt2lab.config.schema import Config
from gpt2lab.runs import history
from gpt2lab.runs.history import WARM_UP

Z80 = 1.2816  # standard deviations to either side that hold 80 % of a normal distribution

_LINE_EVERY = 60.0  # seconds between progress lines

_WINDOW_SECONDS, _FEWEST_STEPS, MOST_STEPS = 600.0, 200, 3000  # steps whose pace counts
_OUTLIER = 5.0  # a longer step counts as this many medians, so that stalls do not change the pace
# After so many own steps, an earlier start's pace is dropped if it differs by more than the next factor.
_OWN_PACE_FROM = 20
_SAME_PACE = 1.15
_DRIFT = 0.01  # relative drift of a pace
_UNKNOWN = 0.3  # relative error of a pace of very few steps
_EVENTS_COUNT = 10  # newest events of a kind that count
_EVENT_SPREAD = 0.1  # what events may be off by, relative


@dataclass(frozen=True)
class Interval:
    """`value`, and its 80 % bounds: the actual number lies between them in four of five cases."""

    value: float
    low: float
    high: float

    @staticmethod
    def log_normal(value: float, sigma: float) -> Interval:
        """Return value times and divided by e^(1.28 sigma): `sigma` is the deviation of the logarithm."""
        factor = math.exp(Z80 * sigma)
        return Interval(value, value / factor, value * factor)

    def scaled(self, factor: float) -> Interval:
        """Return all three times a positive factor."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def inverse_of(self, amount: float) -> Interval:
        """Return amount / this: seconds of a step -> tokens a second."""
        return Interval(amount / self.value, amount / self.high, amount / self.low)


def total(parts: list[Interval]) -> Interval:
    """Add parts whose errors are independent: deviations add in quadrature, on each side separately."""
    value = sum(part.value for part in parts)
    below = math.hypot(*(part.value - part.low for part in parts))
    above = math.hypot(*(part.high - part.value for part in parts))
    return Interval(value, max(0.0, value - below), value + above)


class Progress:
    """Seconds left, knowing the evaluations, samples and checkpoints that are still to come."""

    def __init__(self, *, last_step: int, frequencies: dict[str, int]) -> None:
        """`frequencies`: steps between events of each kind, e.g. {"eval": 250}; 0 = only after the last step."""
        self.last_step, self._frequencies = last_step, frequencies
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._seen = self._stale_from = 0
        self._events: dict[str, list[float]] = {kind: [] for kind in frequencies}
        self._inherited: list[float] = []
        self._pace: Interval | None = None

    def inherit(self, steps: Sequence[float], events: Sequence[tuple[str, float]]) -> None:
        """Use the times of an earlier start on the same hardware, unless this one turns out faster or slower."""
        self._inherited = list(steps)[WARM_UP:][-MOST_STEPS:]
        for kind, seconds in events:
            self.record_event(kind, seconds)

    def record_step(self, seconds: float) -> None:
        """Note one step of this start."""
        self._seen += 1
        if self._seen > WARM_UP:
            self._steps.append(seconds)

    def record_event(self, kind: str, seconds: float) -> None:
        """Note what one event took."""
        if kind in self._events:
            self._events[kind].append(seconds)

    def pace(self) -> Interval | None:
        """Return the mean seconds of recent steps, outliers clipped, with its 80 % interval; None before the first."""
        if self._seen >= self._stale_from:
            self._pace = self._measure_pace()
            # Sorting thousands of steps after each of them would cost more than a small step.
            self._stale_from = self._seen + 1 + len(self._steps) // 50
        return self._pace

    def stop_seconds(self, save: float, *, num_steps: int = 1) -> float:
        """Return how long a stop may still take: slow steps and a save of so many seconds, half as much again."""
        steps = sorted(itertools.islice(reversed(self._steps), 100))
        step = steps[round(0.95 * (len(steps) - 1))] if steps else 0.0
        return 1.5 * (num_steps * step + save)

    def remaining_interval(self, step: int, *, is_measured: bool = True) -> Interval | None:
        """Return the seconds left after `step`, and after what is due there if that is done; None without a pace."""
        pace = self.pace()
        if pace is None:
            return None
        events = self.events_left(step if is_measured else step - 1)
        around = _EVENT_SPREAD * events
        left = Interval(events, max(0.0, events - around), events + around)
        return total([pace.scaled(self.last_step - step), left])

    def events_left(self, step: int) -> float:
        """Return the seconds of the evaluations, samples and checkpoints still to come after `step`."""
        freqs, last = self._frequencies, self.last_step
        counts = {kind: count_due(step, freq, last) for kind, freq in freqs.items()}
        if freqs.keys() >= {"checkpoint", "eval"}:
            counts["checkpoint"] = count_saves(step, freqs["checkpoint"], freqs["eval"], last)
        return sum(
            statistics.fmean(seconds[-_EVENTS_COUNT:]) * counts[kind]
            for kind, seconds in self._events.items()
            if seconds
        )

    def _measure_pace(self) -> Interval | None:
        if self._inherited and len(self._steps) >= _OWN_PACE_FROM:
            change = statistics.median(self._steps) / statistics.median(self._inherited)
            if not 1 / _SAME_PACE < change < _SAME_PACE:
                self._inherited = []
        steps = _recent([*self._inherited, *self._steps])
        if not steps:
            return None
        ceiling = _OUTLIER * statistics.median(steps)
        clipped = [min(seconds, ceiling) for seconds in steps]
        mean = statistics.fmean(clipped)
        return Interval.log_normal(mean, math.hypot(_error_of_mean(clipped), _DRIFT))


def _recent(steps: list[float]) -> list[float]:
    """Return the last steps: those of ten minutes, but at least 200."""
    newest_first = steps[::-1]
    enough = bisect.bisect_left(list(itertools.accumulate(newest_first)), _WINDOW_SECONDS) + 1
    return newest_first[: max(_FEWEST_STEPS, enough)]


def _error_of_mean(steps: Sequence[float]) -> float:
    """Return the relative standard error of a mean of correlated neighbours, from the means of blocks."""
    mean = statistics.fmean(steps)
    block = max(1, min(50, len(steps) // 8))
    starts = range(0, len(steps) - block + 1, block)
    blocks = [statistics.fmean(steps[i : i + block]) for i in starts]
    if len(blocks) < 2 or mean <= 0:
        return _UNKNOWN
    return statistics.stdev(blocks) / math.sqrt(len(blocks)) / mean


# -- the clock of a running trainer ------------------------------------------------------------------------------


def read_forecast(run_dir: Path) -> tuple[float | None, float | None]:
    """Return the seconds that the full run may take at most, and those of compiling, as a run's estimate.json says."""
    document = history.read_json(run_dir / "estimate.json") or {}
    predicted, parts = document.get("estimate"), document.get("breakdown")
    high = predicted.get("high_hours") if isinstance(predicted, dict) else None
    compiling = parts.get("compile_s") if isinstance(parts, dict) else None
    most = 3600 * high if isinstance(high, int | float) else None
    return most, compiling if isinstance(compiling, int | float) else None


class RunClock:
    """Counts from the beginning of this start; knows the pace, --max_hours and the forecast."""

    def __init__(
        self, config: Config, *, last_step: int, began: float, expected_seconds: float | None
    ) -> None:
        """`began`: monotonic clock; `expected_seconds`: upper bound of the forecast for the full run."""
        self.progress = Progress(last_step=last_step, frequencies=frequencies(config))
        self._began, self._expected = began, expected_seconds
        self._tokens = config.batch.total_batch_size
        hours = config.length.max_hours
        self._limit = None if hours is None else 3600 * hours
        self._elapsed_before = self._said = 0.0

    def take_over(self, run_dir: Path, *, same_hardware: bool) -> None:
        """Continue from earlier starts: their time counts, and on the same hardware also their pace."""
        log = history.read_log(run_dir)
        self._elapsed_before = log.spent_seconds()
        begins = log.of_kind("begin")
        if len({(begin["max_steps"], begin.get("tokens_per_step")) for begin in begins}) > 1:
            self._expected = None  # the forecast is of another length or batch
        if same_hardware:
            others = [e for e in log.events if e["event"] != "done" and history.stall_of(e)]
            rates = log.column("tokens_per_second")[-MOST_STEPS - WARM_UP :]
            self.progress.inherit(  # a step may have had fewer tokens than now
                (self._tokens / rates[rates > 0]).tolist(),
                [(event["event"], history.stall_of(event) or 0.0) for event in others],
            )

    def describe_left(self, step: int) -> str:
        """Return the time that is left at a resume, and what it is measured from."""
        left = self.progress.remaining_interval(step)
        if left is None:
            return "time left      n/a before this start's first steps: no earlier ones on this hardware"
        span = " ... ".join(map(fmt.duration, (left.low, left.high)))
        return (
            f"time left      {fmt.duration(left.value)} ({span}, 80 %), from earlier starts' steps"
        )

    def elapsed(self) -> float:
        """Return the seconds of this start so far."""
        return time.monotonic() - self._began

    def is_on_track(self, left: Interval | None) -> bool | None:
        """Tell whether the run ends in time: within --max_hours by its upper bound, else within the forecast."""
        if left is None:
            return None
        if self._limit is not None:
            return self.elapsed() + left.high <= self._limit
        if self._expected is None:
            return None
        return self._elapsed_before + self.elapsed() + left.value <= self._expected

    def line(self, step: int, left: Interval | None) -> str | None:
        """Return the progress line, at most once a minute; else None."""
        now = self.elapsed()
        if left is None or now < self._said + _LINE_EVERY:
            return None
        self._said = now
        on_track = self.is_on_track(left)
        late = "later than the forecast" if self._limit is None else "beyond --max_hours"
        track = "" if on_track is None else f" | {'on time' if on_track else late}"
        pace, done = self.progress.pace(), 1000 * step // self.progress.last_step / 1000
        return (
            f"progress {done:.1%} | elapsed {fmt.duration(self._elapsed_before + now)} | "
            f"remaining {fmt.duration(left.value)} ({fmt.duration(left.low)} ... {fmt.duration(left.high)}) | "
            f"{3600 / pace.value if pace else 0.0:,.0f} steps/h{track}"
        )
