"""The clock of a run that has begun: its pace, what is left and when, on track or not. No torch.

Steps count by their recent pace, evaluations, samples and checkpoints by their own cost. `Progress` and `RunClock`
serve the running trainer, `estimate_remaining` reads the same from a run's metrics.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.config.derived import count_due, frequencies
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import count_parameters, training_flops_per_token
from gpt2lab.planner.job import Job
from gpt2lab.planner.reports import blank, describe_actual
from gpt2lab.planner.timing import Interval, total
from gpt2lab.runs import history
from gpt2lab.runs.history import read_json

MILESTONES = (0.1, 0.25, 0.5, 0.75, 1.0)
_LINE_EVERY = 60.0  # seconds between progress lines

_WARM_UP = 2  # first steps of a start: compiling, page faults, allocator
_WINDOW_SECONDS, _FEWEST_STEPS, _MOST_STEPS = 600.0, 200, 3000  # steps whose pace counts
_OUTLIER = 5.0  # a step longer than this many medians counts as that many: stalls set no pace
_OWN_PACE_FROM = 20  # own steps that replace an earlier start's pace
_DRIFT = 0.01  # relative drift of a pace
_UNKNOWN = 0.3  # relative error of a pace of very few steps
_EVENTS_COUNT = 10  # newest events of a kind that count
_EVENT_SPREAD = 0.1  # what events may be off by, relative


class Progress:
    """Seconds left, knowing the evaluations, samples and checkpoints that are still to come."""

    def __init__(self, *, last_step: int, frequencies: dict[str, int]) -> None:
        """`frequencies`: steps between events of each kind, e.g. {"eval": 250}; 0 = only after the last step."""
        self.last_step, self._frequencies = last_step, frequencies
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._seen = self._stale_from = 0
        self._events: dict[str, list[float]] = {kind: [] for kind in frequencies}
        self._save_to_stop: float | None = None
        self._inherited: list[float] = []
        self._pace: Interval | None = None

    def inherit(self, steps: Sequence[float], events: Sequence[tuple[str, float]]) -> None:
        """Use the times of an earlier start on the same hardware until this one has a pace of its own."""
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

    def record_save(self, stall: float | None, to_stop: float | None) -> None:
        """Note what a checkpoint costs: the seconds that training waited, and those that a stop must wait to save."""
        if stall is not None:
            self.record_event("checkpoint", stall)
        if to_stop is not None:
            self._save_to_stop = to_stop

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

    def stop_seconds(self, *, assumed_save: float = 0.0, num_steps: int = 1) -> float:
        """Return how long a stop may still take: slow steps and the last save, half as much again.

        `assumed_save` stands in for the save before there was one.
        """
        steps = sorted(itertools.islice(reversed(self._steps), 100))
        step = steps[round(0.95 * (len(steps) - 1))] if steps else 0.0
        save = assumed_save if self._save_to_stop is None else self._save_to_stop
        return 1.5 * (num_steps * step + save)

    def remaining_interval(self, step: int) -> Interval | None:
        """Return the seconds left after `step`, None before there is a pace."""
        pace = self.pace()
        if pace is None:
            return None
        events = self.events_left(step)
        around = _EVENT_SPREAD * events
        left = Interval(events, max(0.0, events - around), events + around)
        return total([pace.scaled(self.last_step - step), left])

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
    """Return the relative standard error of a mean of correlated neighbours, from the means of blocks."""
    mean = statistics.fmean(steps)
    block = max(1, min(50, len(steps) // 8))
    starts = range(0, len(steps) - block + 1, block)
    blocks = [statistics.fmean(steps[i : i + block]) for i in starts]
    if len(blocks) < 2 or mean <= 0:
        return _UNKNOWN
    return statistics.stdev(blocks) / math.sqrt(len(blocks)) / mean


# -- the clock of a running trainer ------------------------------------------------------------------------------


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
        self, config: Config, *, last_step: int, began: float, expected_seconds: float | None
    ) -> None:
        """`began`: monotonic clock; `expected_seconds`: upper bound of the forecast for the full run."""
        self.progress = Progress(last_step=last_step, frequencies=frequencies(config))
        self._began, self._expected = began, expected_seconds
        hours = config.length.max_hours
        self._limit = None if hours is None else 3600 * hours
        self._elapsed_before = self._said = 0.0

    def take_over(self, run_dir: Path, *, same_hardware: bool) -> None:
        """Go on from the starts before: their time counts, and on the same hardware also their pace."""
        log = history.read_log(run_dir)
        self._elapsed_before = log.spent_seconds()
        if same_hardware:
            others = [e for e in log.events if e["event"] != "done" and history.stall_of(e)]
            self.progress.inherit(
                log.column("step_seconds")[-_MOST_STEPS - _WARM_UP :].tolist(),
                [(event["event"], history.stall_of(event) or 0.0) for event in others],
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
        """Write where the run stands, at most once a minute."""
        now = self.elapsed()
        if left is None or now < self._said + _LINE_EVERY:
            return None
        self._said = now
        on_track = self.is_on_track(left)
        late = "later than the forecast" if self._limit is None else "beyond --max_hours"
        track = "" if on_track is None else f" | {'on time' if on_track else late}"
        pace = self.progress.step_seconds() or math.inf
        return (
            f"progress {step / self.progress.last_step:.1%} | elapsed {fmt.duration(self._elapsed_before + now)} | "
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


# -- the rest of a run, from its metrics -------------------------------------------------------------------------


@dataclass(frozen=True)
class Remaining:
    """What is known of a run that has begun."""

    run_dir: Path
    config: Config
    step: int
    last_step: int
    pace: Interval | None  # seconds of a step in the last start; None before there is one
    seconds: Interval | None  # left
    events_seconds: float  # of them, in evaluations, samples and checkpoints
    trained_seconds: float  # in steps, over all starts
    elapsed_seconds: float  # of all starts, without the pauses between them
    environment: dict[str, Any]
    estimated: dict[str, Any] | None  # estimate.json

    @property
    def throughput(self) -> Interval | None:
        """Tokens a second in the last start."""
        return self.pace.inverse_of(self.config.batch.total_batch_size) if self.pace else None

    @property
    def milestones(self) -> list[tuple[int, Interval]]:
        """(step, seconds from now) of each share of the run that is still to come, events included."""
        if self.seconds is None:
            return []
        steps_left = self.last_step - self.step
        at = [round(share * self.last_step) for share in MILESTONES]
        return [(n, self.seconds.scaled((n - self.step) / steps_left)) for n in at if n > self.step]


def last_written_run(checkpoint_dir: Path) -> Path | None:
    """Return the run that wrote to its metrics last, or None."""
    files = checkpoint_dir.glob(f"*/{catalog.METRICS}")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


def estimate_remaining(run_dir: Path) -> Remaining:
    """Project the rest of a run from the pace of its last start and the cost of its events.

    Raises: ConfigError if the folder is not a run that has begun, or its log does not match its config.json.
    """
    config, log = history.read_config(run_dir), history.read_log(run_dir)
    if not log:
        raise ConfigError(f"{run_dir}: has not begun to train; nothing to go by yet")
    begin = log.last_begin
    if begin is None or "tokens_per_step" not in begin:
        raise ConfigError(
            f"{run_dir}: {catalog.METRICS} does not say how long the run is; restore the run's own files"
        )
    if begin["tokens_per_step"] != config.batch.total_batch_size:
        raise ConfigError(
            f"{run_dir}: {catalog.METRICS} is of {begin['tokens_per_step']} tokens a step, config.json of "
            f"{config.batch.total_batch_size}: a log from another config; restore the run's own files"
        )
    last_step, attempt = begin["max_steps"], log.last_attempt
    progress = Progress(last_step=last_step, frequencies=frequencies(config))
    # Another start may have run on another machine.
    for seconds in log.last_start("step_seconds")[-_MOST_STEPS - _WARM_UP :].tolist():
        progress.record_step(seconds)
    for event in log.events:
        stall = history.stall_of(event)
        if event["attempt"] == attempt and stall is not None and event["event"] != "done":
            progress.record_event(event["event"], stall)
    step = int(log.numbers[-1]) if len(log.numbers) else 0
    return Remaining(
        run_dir=run_dir,
        config=config,
        step=step,
        last_step=last_step,
        pace=progress.pace(),
        seconds=progress.remaining_interval(step),
        events_seconds=progress.events_left(step),
        trained_seconds=float(np.nansum(log.column("step_seconds"))),
        elapsed_seconds=log.spent_seconds(),
        environment=(read_json(run_dir / "run.json") or {}).get("environment") or {},
        estimated=read_json(run_dir / "estimate.json"),
    )


def describe(remaining: Remaining, now: float) -> str:
    """Write the projection for people."""
    rate, left = remaining.throughput, remaining.seconds
    done = f"{remaining.step:,} of {remaining.last_step:,} steps in {fmt.duration(remaining.elapsed_seconds)}"
    speed = "n/a: a few steps more are needed"
    if rate is not None:
        around = f"{fmt.count(rate.low)} ... {fmt.count(rate.high)}"
        speed = f"{fmt.count(rate.value)} tok/s in the last start ({around})"
    lines = [
        f"run          {paths.display_path(remaining.run_dir)}",
        f"done         {done} (steps alone {fmt.duration(remaining.trained_seconds)})",
        f"speed        {speed}",
    ]
    if remaining.step >= remaining.last_step:
        return "\n".join([*lines, "remaining    nothing: the run is complete", *_score(remaining)])
    if left is None:
        return "\n".join([*lines, "remaining    n/a: no steps of the last start to go by"])
    lines.append(
        f"remaining    {fmt.duration(left.value)} ({fmt.duration(left.low)} ... {fmt.duration(left.high)}, 80 %), "
        f"of it {fmt.duration(remaining.events_seconds)} evaluations, samples and checkpoints"
    )
    end = fmt.moment(now + left.value)
    lines.append(f"finished     {end}, if it runs from now on without a pause")
    tokens = remaining.config.batch.total_batch_size
    rows = [
        [
            f"{at / remaining.last_step:.0%}",
            f"{at:,}",
            fmt.count(at * tokens),
            fmt.moment(now + span.value),
            f"{fmt.moment(now + span.low)[5:]} ... {fmt.moment(now + span.high)[5:]}",
        ]
        for at, span in remaining.milestones
    ]
    table = fmt.table(["milestone", "step", "tokens", "when", "80 %"], rows)
    return "\n".join([*lines, "", table])


def _score(remaining: Remaining) -> list[str]:
    actual = (remaining.estimated or {}).get("actual")
    if not isinstance(actual, dict) or actual.get("time_accuracy") is None:
        return []
    return [f"forecast     {describe_actual(actual)}"]


def as_json(remaining: Remaining, now: float) -> dict[str, Any]:
    """Return the projection as one object; a part that is not known is null."""
    config, left, rate = remaining.config, remaining.seconds, remaining.throughput
    tokens = config.batch.total_batch_size
    result = blank() | {
        "run": str(remaining.run_dir),
        "model": {
            "parameters": count_parameters(config.model),
            "flops_per_token": training_flops_per_token(config),
        },
        "dataset_info": {"training_tokens": remaining.last_step * tokens},
        "actual": (remaining.estimated or {}).get("actual"),
        "throughput": None
        if rate is None
        else dataclasses.asdict(rate) | {"source": "log", "quality": "ok", "mfu": None},
    }
    if left is not None:
        result["estimate"] = {
            "total_steps": remaining.last_step,
            "estimated_hours": left.value / 3600,
            "fits_in_window": None,
            "verdict": None,
            "low_hours": left.low / 3600,
            "high_hours": left.high / 3600,
            "sigma_log": None,
            "completed_steps": remaining.step,
            "elapsed_hours": remaining.elapsed_seconds / 3600,
        }
        result["breakdown"] = {
            "train_s": left.value - remaining.events_seconds,
            "events_s": remaining.events_seconds,
        }
        result["milestones"] = [
            milestone(at, span, tokens_per_step=tokens, now=now)
            for at, span in remaining.milestones
        ]
    result["memory"] = _memory(config, remaining.environment)
    return result


def milestone(step: int, span: Interval, *, tokens_per_step: int, now: float) -> dict[str, Any]:
    """Return when a step is reached, `span` seconds from `now`, in Unix seconds."""
    times = {"time": now + span.value, "low": now + span.low, "high": now + span.high}
    return {"step": step, "tokens": step * tokens_per_step} | times


def _memory(config: Config, environment: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a rank of the run's last start needs; None where that is not known, as of offloaded weights."""
    world_size, size = environment.get("world_size"), environment.get("mini_batch_size")
    dtype = environment.get("dtype")
    if config.system.fsdp_offload or not world_size or not size or dtype not in ("fp32", "bf16"):
        return None
    config = override(config, {"mini_batch_size": size})
    need = Job(config, 0, world_size, dtype, compiled=False).memory()
    return dataclasses.asdict(need) | {"total": need.tensors}
