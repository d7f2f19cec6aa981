"""What a few training seeds can tell: intervals, power, Holm's correction, and when to stop adding seeds. No torch.

A value is the difference of two settings that were trained with the same seed, one value a seed. Everything here takes
these differences as independent draws from one Gaussian whose mean and variance are unknown.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpt2lab.evaluation.uncertainty import ALPHA, t_half_width, t_p_value

POWER = 0.8  # how often a difference of the named size should show
MOST_SEEDS = 10_000  # a larger answer helps nobody
_QUANTILES = 2000  # of a variance, to average a power over it: to 1e-4
# The precision (1 / variance) of the mixture over effect sizes, mean / standard deviation: narrow between 4 and 10
# seeds, and the first interval that ends comes with the third seed. A constant, since it may not follow the data.
_MIXTURE = 0.1

Decision = Literal["differs", "equal"]


@dataclass(frozen=True)
class OverSeeds:
    """The mean of one value a seed; what a single seed cannot tell is None."""

    seeds: int
    mean: float
    sd: float | None  # over seeds, with n - 1
    low: float | None  # 95 % interval of the mean, Student's t
    high: float | None
    p: float | None  # two-sided, that the mean is 0


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Return the mean of one value a seed with its t interval and t test."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return OverSeeds(n, mean, None, None, None, None)
    sd = float(np.std(values, ddof=1))
    se = sd / math.sqrt(n)
    half = float(t_half_width(se, n - 1))
    return OverSeeds(n, mean, sd, mean - half, mean + half, float(t_p_value(mean, se, n - 1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for all of them: reject those below alpha, and one false rejection in all has <= alpha.

    Holm 1979, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 65-70.
    """
    adjusted, reached = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = reached
    return adjusted


# -- how many seeds --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeedsNeeded:
    """Seeds in all that would show a difference with the stated power; None: over `MOST_SEEDS`.

    `low` and `high` are the answers for the ends of the 95 % interval of the standard deviation over seeds.
    """

    difference: float
    power: float
    seeds: int | None
    low: int | None
    high: int | None


def seeds_needed(
    found: OverSeeds, difference: float, *, alpha: float = ALPHA, sequential: bool = False
) -> SeedsNeeded | None:
    """Return how many seeds would show a true difference of this size; None from one seed, which has no spread.

    `sequential`: by the confidence sequence instead of the t test; it needs more.
    """
    if found.sd is None:
        return None
    low, high = sd_interval(found.sd, found.seeds)
    answers = [
        _fewest_seeds(difference, sd, alpha=alpha, sequential=sequential)
        for sd in (found.sd, low, high)
    ]
    return SeedsNeeded(difference, POWER, *answers)


def sd_interval(sd: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of the standard deviation behind n values, by chi-square."""
    from scipy.special import chdtri

    low, high = ((n - 1) / chdtri(n - 1, tail) for tail in (ALPHA / 2, 1 - ALPHA / 2))
    return sd * math.sqrt(low), sd * math.sqrt(high)


def power(difference: float, sd: float, n: int, critical: float) -> float:
    """Return how often t of n values exceeds `critical` on the side of their true mean, `difference`: noncentral t.

    The mean over the quantiles of the sample's variance; scipy's nctdtr is NaN in far tails.
    """
    from scipy.special import chdtri, ndtr

    if not math.isfinite(critical):
        return 0.0
    if sd == 0:
        return 1.0
    variance = chdtri(n - 1, (np.arange(_QUANTILES) + 0.5) / _QUANTILES) / (n - 1)
    return float(ndtr(math.sqrt(n) * abs(difference) / sd - critical * np.sqrt(variance)).mean())


def _fewest_seeds(difference: float, sd: float, *, alpha: float, sequential: bool) -> int | None:
    def shows(n: int) -> bool:
        if sequential:
            critical = float(sequence_half_width(1.0, n, alpha)) * math.sqrt(n)
        else:
            critical = float(t_half_width(1.0, n - 1, alpha))
        return power(difference, sd, n, critical) >= POWER

    counts = range(2, MOST_SEEDS + 1)
    place = bisect.bisect_left(counts, True, key=shows)  # more seeds never show less
    return counts[place] if place < len(counts) else None


# -- when to stop ----------------------------------------------------------------------------------------------------


def sequence_half_width(
    sd: np.ndarray | float, n: np.ndarray | int, alpha: float = ALPHA
) -> np.ndarray:
    """Return half the width of a confidence sequence for a Gaussian mean, after n values; inf where it has no end yet.

    With probability 1 - alpha the intervals after 2, 3, 4, ... values all hold the mean, so that one may look after
    each value and stop for any reason: the Gaussian mixture of Wang and Ramdas, "Anytime-valid t-tests and confidence
    sequences for Gaussian means with unknown variance" (arXiv:2310.03722), after Lai 1976, "On confidence sequences",
    Annals of Statistics 4, 265-280. For a supposed mean m and with c^2 = `_MIXTURE`, the ratio

        sqrt(c^2 / (n + c^2)) * (sum (x - m)^2 / (sum (x - m)^2 - (sum (x - m))^2 / (n + c^2)))^(n/2)

    is that of the likelihoods of (x - m) / |x_1 - m| under effect sizes N(0, 1 / c^2) and 0: a martingale of mean 1 if
    m is true, whatever the variance.
    By Ville's inequality it ever reaches 1 / alpha with probability <= alpha. The interval is all m where it does not.
    """
    count = np.asarray(n, dtype=np.float64)
    bound = ((count + _MIXTURE) / (_MIXTURE * alpha**2)) ** (1 / count)
    slack = 1 - bound * _MIXTURE / (count + _MIXTURE)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.sqrt((bound - 1) * (count - 1) / (count * slack))
    return np.where(slack > 0, factor, np.inf) * np.where(slack > 0, sd, 1.0)


@dataclass(frozen=True)
class Looks:
    """The confidence sequence after each of N seeds, arrays (..., N); the first seed alone has no interval."""

    mean: np.ndarray
    half_width: np.ndarray
    differs: np.ndarray  # bool: the interval excludes 0
    equal: np.ndarray  # bool: it lies wholly within +-smallest

    def first(self) -> np.ndarray:
        """Return the index of the first look that decides, N where none does."""
        decides = self.differs | self.equal
        return np.where(decides.any(axis=-1), decides.argmax(axis=-1), decides.shape[-1])


def look(values: np.ndarray, *, smallest: float, alpha: float = ALPHA) -> Looks:
    """Look at (..., N) values, one a seed, after each seed."""
    n = np.arange(1, values.shape[-1] + 1)
    origin = values[..., :1]  # sums of squares around it lose no digits
    moved = values - origin
    mean = moved.cumsum(axis=-1) / n
    squares = np.maximum((moved**2).cumsum(axis=-1) - n * mean**2, 0)
    sd = np.sqrt(squares / np.maximum(n - 1, 1))
    half = np.where(n > 1, sequence_half_width(sd, np.maximum(n, 2), alpha), np.inf)
    mean = mean + origin
    return Looks(mean, half, np.abs(mean) > half, np.abs(mean) + half < smallest)


@dataclass(frozen=True)
class Sequential:
    """What a confidence sequence says when it decides, or after the last seed if it does not."""

    decision: Decision | None
    seeds: int  # when it decided, or all
    confidence: float
    mean: float  # of these seeds
    low: float | None  # None: no end yet
    high: float | None


def decide(values: Sequence[float], *, smallest: float, alpha: float = ALPHA) -> Sequential:
    """Return the first decision along the values, one a seed, in their order; later values do not change it."""
    looks = look(np.asarray(values, dtype=np.float64), smallest=smallest, alpha=alpha)
    first = int(looks.first())
    place = min(first, len(values) - 1)
    decision: Decision | None = None
    if first < len(values):
        decision = "differs" if looks.differs[first] else "equal"
    mean, half = float(looks.mean[place]), float(looks.half_width[place])
    ends = (mean - half, mean + half) if math.isfinite(half) else (None, None)
    return Sequential(decision, place + 1, 1 - alpha, mean, *ends)


def first_bounded(alpha: float = ALPHA) -> int:
    """Return the number of seeds from which on a confidence sequence has ends."""
    n = 2
    while not math.isfinite(float(sequence_half_width(1.0, n, alpha))):
        n += 1
    return n
