"""Which process do the others wait for? Told by the time each needs before they first meet in a step.

The length of whole steps cannot tell: the processes wait for each other within them, so all are equally long.
"""

from __future__ import annotations

import socket
import statistics

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.runs.logger import Telemetry

EVERY = 10  # steps between comparisons
RATIO = 1.3  # of the slowest to the median
IN_A_ROW = 3  # comparisons: once is noise
_LEAST_SECONDS = 0.02  # a step; what costs less is not worth a line


class Stragglers:
    """Sums up this process's own work and compares it with the others'."""

    def __init__(self, runtime: Runtime, telemetry: Telemetry) -> None:
        self._runtime, self._telemetry = runtime, telemetry
        self._work = self._wait = 0.0
        self._suspect, self._times = -1, 0

    def note(self, step: int, *, work_seconds: float, wait_seconds: float) -> None:
        """Note one step: seconds until this process was ready to meet the others, and those spent on data."""
        if not self._runtime.is_distributed:
            return
        self._work, self._wait = self._work + work_seconds, self._wait + wait_seconds
        if step % EVERY:
            return
        mine = (self._work / EVERY, self._wait / EVERY, socket.gethostname())
        self._work = self._wait = 0.0
        everyone = self._runtime.gather(mine)
        totals = [work + wait for work, wait, _ in everyone]
        slowest = max(range(len(totals)), key=totals.__getitem__)
        median = statistics.median_low(totals)
        is_slow = totals[slowest] > max(RATIO * median, median + _LEAST_SECONDS)
        self._times = self._times + 1 if is_slow and slowest == self._suspect else int(is_slow)
        self._suspect = slowest if is_slow else -1
        if self._times == IN_A_ROW:
            self._times = 0
            _, wait, host = everyone[slowest]
            self._telemetry.warn(
                f"process {slowest} on {host} is slow: {totals[slowest]:.3f} s of its own a step "
                f"({wait:.3f} s waiting for data), the median process {median:.3f} s; all wait for it",
                step,
            )
