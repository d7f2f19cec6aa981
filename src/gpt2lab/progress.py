"""When things are due, and how long the rest will take: steps by their recent pace, events by their own cost."""

from __future__ import annotations

import statistics
from collections import deque

from gpt2lab.config import Config

_WINDOW = 100  # steps whose pace counts
_WARM_UP = 2  # first steps of a start: compiling, page faults, allocator


def is_due(step: int, freq: int, last: int) -> bool:
    """Tell whether something with frequency `freq` happens after update `step` of `last`; always after the last."""
    return step == last or (freq > 0 and step % freq == 0)


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
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._seen = 0
        self._events: dict[str, list[float]] = {kind: [] for kind in frequencies}

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
        """Return the recent mean step, single outliers clipped to the 5th and 95th percentile."""
        if not self._steps:
            return None
        ordered = sorted(self._steps)
        low, high = (
            ordered[int(0.05 * (len(ordered) - 1))],
            ordered[round(0.95 * (len(ordered) - 1))],
        )
        return statistics.fmean(min(max(seconds, low), high) for seconds in ordered)

    def stop_seconds(self) -> float:
        """Return how long a stop may still take: one slow step and the last save, half as much again."""
        step = sorted(self._steps)[round(0.95 * (len(self._steps) - 1))] if self._steps else 0.0
        saves = self._events.get("checkpoint", [])
        return 1.5 * (step + (saves[-1] if saves else 0.0))

    def remaining(self, step: int) -> float | None:
        """Return the seconds left after `step`, or None before there is a pace to go by."""
        pace = self.step_seconds()
        if pace is None:
            return None
        events = sum(
            statistics.fmean(self._events[kind]) * count_due(step, freq, self.last_step)
            for kind, freq in self._frequencies.items()
            if self._events[kind]
        )
        return pace * (self.last_step - step) + events
