"""Whether somebody else uses the processor: then wall-clock times say nothing about an idle machine. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.10  # share of the machine in other hands from which a measurement is not to be trusted

_STAT = Path("/proc/stat")


class Watch:
    """Counts the processor time of the machine and of this process (with the children it waited for)."""

    def __init__(self) -> None:
        """Begin to watch."""
        self._began = self._read()

    def others(self) -> float | None:
        """Return the share of all cores that others used since the beginning, 0 to 1; None where unknown."""
        if self._began is None:
            return None
        now = self._read()
        if now is None:
            return None
        machine, own, wall = (new - old for new, old in zip(now, self._began, strict=True))
        capacity = wall * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (machine - own) / capacity)) if capacity > 0 else None

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Return (busy seconds of all cores, stolen ones included; seconds of this process; clock)."""
        try:
            cells = [int(cell) for cell in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = (cells + [0] * 8)[:8]
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy, sum(os.times()[:4]), time.monotonic()
