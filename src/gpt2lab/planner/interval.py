"""A number with the 80 % interval it comes with."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z80 = 1.2816  # standard deviations to either side that hold 80 % of a normal distribution


@dataclass(frozen=True)
class Interval:
    """`value`, and bounds that should hold reality in four of five cases."""

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

    def contains(self, number: float) -> bool:
        """Tell whether a number lies within the bounds."""
        return self.low <= number <= self.high


def total(parts: list[Interval]) -> Interval:
    """Add parts that err independently: their deviations add in quadrature, to each side on its own."""
    value = sum(part.value for part in parts)
    below = math.hypot(*(part.value - part.low for part in parts))
    above = math.hypot(*(part.high - part.value for part in parts))
    return Interval(value, max(0.0, value - below), value + above)
