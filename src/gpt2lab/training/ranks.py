"""Ranks compared with each other: do all hold the same weights, and which one do the others wait for?"""

from __future__ import annotations

import socket
import statistics

import torch
from torch import nn

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.sharding import is_sharded
from gpt2lab.errors import DriftError
from gpt2lab.runs.logger import MetricsLogger

EVERY = 10  # steps between comparisons
RATIO = 1.3  # of the slowest to the median
IN_A_ROW = 3  # comparisons: once is noise
_LEAST_SECONDS = 0.02  # a step; what costs less is not worth a line


class Stragglers:
    """Adds up the work of each rank and names the slowest.

    The length of full steps cannot tell: ranks wait for each other within a step, so all are equally long. What is
    compared is the time each rank needs before ranks first meet in a step.
    """

    def __init__(self, runtime: Runtime, logger: MetricsLogger) -> None:
        self._runtime, self._logger = runtime, logger
        self._work = self._wait = 0.0
        self._suspect, self._times = -1, 0

    def note(self, step: int, *, work_seconds: float, wait_seconds: float) -> None:
        """Note one step: seconds until this rank was ready to meet the others, and those spent on data."""
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
            self._logger.warn(
                f"rank {slowest} on {host} is slow: {totals[slowest]:.3f} s of its own a step "
                f"({wait:.3f} s waiting for data), the median rank {median:.3f} s; all wait for it",
                step,
            )


def checksum(parameter: torch.Tensor) -> int:
    """Return the sum of a tensor's bits read as 32-bit integers, modulo 2**64: one flipped bit always changes it."""
    bits = parameter.detach().float().contiguous().view(torch.int32)
    return int(bits.sum(dtype=torch.int64))


def check_drift(model: nn.Module, runtime: Runtime, step: int) -> None:
    """Compare the checksum of every parameter that each rank holds a replica of; under fsdp there is none.

    Replicas that once differ stay different, and no loss shows it.

    Raises: DriftError on all ranks, naming the first parameter that differs and its checksums.
    """
    if not runtime.is_distributed:
        return
    copies = {name: p for name, p in model.named_parameters() if not is_sharded(p)}
    everyone = runtime.gather([checksum(parameter) for parameter in copies.values()])
    for name, sums in zip(copies, zip(*everyone, strict=True), strict=True):
        if len(set(sums)) > 1:
            sums_by_rank = ", ".join(f"rank {rank} {value:x}" for rank, value in enumerate(sums))
            raise DriftError(
                f"step {step}: ranks hold different weights, first in {name} (checksums {sums_by_rank}): a memory or "
                f"communication fault; nothing was saved since, resume from the newest checkpoint on other hardware"
            )
