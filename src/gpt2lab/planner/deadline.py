"""What fits a window: the upper bound of the time decides, so that four of five runs with room to spare end in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpt2lab.planner.estimate import Estimate
from gpt2lab.planner.job import Job

Verdict = Literal["fits", "borderline", "does_not_fit"]


@dataclass(frozen=True)
class Window:
    """Seconds from start to deadline, and how many of them stay free."""

    seconds: float
    margin: float

    @property
    def budget(self) -> float:
        """Seconds that may be used."""
        return self.seconds - self.margin


def verdict(estimate: Estimate, window: Window) -> Verdict:
    """Judge a run: `fits` if even the upper bound does, `borderline` if only the middle does."""
    if estimate.memory.fits is False or estimate.seconds.value > window.budget:
        return "does_not_fit"
    return "fits" if estimate.seconds.high <= window.budget else "borderline"


def steps_that_fit(
    job: Job, window: Window, predict: Callable[[Job], Estimate], *, at_most: int | None = None
) -> int:
    """Return the largest number of steps whose upper bound is within the budget, 0 if not even one is."""

    def fits(steps: int) -> bool:
        return predict(job.with_steps(steps)).seconds.high <= window.budget

    if not fits(1):
        return 0
    low, high = 1, 2
    limit = at_most or 10**9
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def cadence_for(estimate: Estimate, share: float) -> int | None:
    """Return the evaluation interval at which evaluations take at most `share` of the time; None if they do."""
    evals, whole = estimate.breakdown["eval"].value, estimate.seconds.value
    if evals <= share * whole:
        return None
    job = estimate.job
    freq = job.config.eval.eval_freq or job.max_steps
    wanted = freq * evals / (share * (whole - evals))
    return min(job.max_steps, -(-round(wanted) // 50) * 50)


def with_eval_freq(job: Job, freq: int) -> Job:
    """Return the job with another evaluation interval."""
    config = job.config
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, eval_freq=freq))
    return dataclasses.replace(job, config=config)
