"""What a run costs: price times cards times hours. A price is a convention with a date, never a fact. No torch."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from gpt2lab.planner.interval import Interval
from gpt2lab.planner.machine import Machine

OLD_AFTER_DAYS = 180


@dataclass(frozen=True)
class Cost:
    """US dollars of a run."""

    usd: Interval
    price_per_gpu_hour: float
    source: str
    date: str | None
    kwh: float | None  # energy, where the cards' power is known

    def is_old(self, today: datetime.date) -> bool:
        """Tell whether the price is older than half a year."""
        if self.date is None:
            return False
        parts = [int(part) for part in self.date.split("-")]
        return (today - datetime.date(*([*parts, 1, 1])[:3])).days > OLD_AFTER_DAYS


def of_run(
    machine: Machine, seconds: Interval, *, price: float | None, kwh: float | None
) -> Cost | None:
    """Return the cost of a run, or None where there is no price. `kwh`: own hardware, pay for power alone."""
    gpu = machine.gpu
    energy = None
    if gpu is not None and gpu.watts is not None:
        energy = gpu.watts * machine.processes * seconds.value / 3.6e6
    if kwh is not None:
        if gpu is None or gpu.watts is None:
            return None
        hourly, source, date = gpu.watts / 1000 * kwh, f"power at {kwh:g} a kWh", None
    elif price is not None:
        hourly, source, date = price, "--price", None
    elif gpu is not None and gpu.usd_per_hour is not None:
        hourly, source, date = gpu.usd_per_hour, gpu.price_source or "", gpu.price_date
    else:
        return None
    usd = seconds.scaled(hourly * machine.processes / 3600)
    return Cost(usd, hourly, source, date, energy)
