"""Statistics of the lab: tests and intervals over units and over seeds, power, confidence sequences. No torch.

A unit is a document, a window or an item of an evaluation, as in `evaluation.uncertainty`. A value over seeds is the
difference of two settings that were trained with the same seed, one value per seed; these are taken as independent
draws from one Gaussian with unknown mean and variance.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpt2lab.evaluation.uncertainty import estimate_mean

ALPHA = 0.05  # 1 - confidence
POWER = 0.8  # the probability with which a difference of the given size should be found
LEAST_DEGREES = 1  # of freedom: two units of equal weight; fewer allow no test and no interval
MOST_SEEDS = 10_000  # larger answers are of no use
_EXACT_UNITS = 12  # up to these all 2^n signs are tried; beyond, Student's t is close enough
_QUANTILES = 2000  # of a variance, to average a power over it: accurate to 1e-4
# The precision (1 / variance) of the mixture over effect sizes (mean / standard deviation): intervals are narrowest
# between 4 and 10 seeds, and finite from the third seed on. A constant, because it may not depend on the data.
_MIXTURE = 0.1

Decision = Literal["differs", "equal"]

# -- over the units of one evaluation --------------------------------------------------------------------------------


def p_of_zero_mean(
    values: np.ndarray, weights: np.ndarray | None = None, strata: Sequence[slice] = ()
) -> float | None:
    """Return the two-sided p-value of a weighted mean of zero; None for a single unit.

    Few units: the share of all 2^n changes of signs whose mean is as far from zero (Fisher's randomisation test, exact
    if differences are symmetric). Otherwise Student's t of mean / se with effective n - 1 degrees of freedom, those of
    strata joined.
    """
    found = estimate_mean(values, weights, strata)
    if found.se is None:
        return None
    if len(values) <= _EXACT_UNITS:
        sums = values if weights is None else values * weights
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(sums))))  # (2^n, n)
        as_far = np.abs(signs @ sums) >= abs(sums.sum()) * (1 - 1e-12)
        return float(as_far.mean())
    return float(t_p_value(found.mean, found.se, found.degrees))


def t_p_value(mean: np.ndarray | float, se: np.ndarray | float, degrees: float) -> np.ndarray:
    """Return the two-sided p-value of Student's t that a mean is 0. `degrees`: of freedom of its standard error."""
    from scipy.special import stdtr  # 0.1 s that --help need not wait for

    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / np.asarray(se)
    return 2 * stdtr(degrees, -np.nan_to_num(t, nan=0.0, posinf=np.inf))  # 0 / 0: no difference


def t_half_width(se: np.ndarray | float, degrees: float, alpha: float = ALPHA) -> np.ndarray:
    """Return half of the 1 - alpha interval of a mean by Student's t."""
    from scipy.special import stdtrit

    return stdtrit(degrees, 1 - alpha / 2) * np.asarray(se)


def p_of_equal_accuracy(of_a: np.ndarray, of_b: np.ndarray) -> float:
    """Return the exact two-sided p-value that two models are right equally often, from (n,) zeros and ones of each.

    McNemar's test: only the items that exactly one model gets right count, and each is a toss of a fair coin.
    """
    from scipy.special import bdtr

    wins, losses = int((of_b > of_a).sum()), int((of_b < of_a).sum())
    if wins == losses:
        return 1.0
    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


# -- over seeds -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OverSeeds:
    """The mean of one value per seed; what a single seed cannot tell is None."""

    seeds: int
    mean: float
    sd: float | None  # over seeds, with n - 1
    low: float | None  # 95 % interval of the mean, Student's t
    high: float | None
    p: float | None  # two-sided, that the mean is 0

    @property
    def se(self) -> float | None:
        """The standard error of the mean."""
        return None if self.sd is None else self.sd / math.sqrt(self.seeds)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval."""
        return None if self.high is None else self.high - self.mean


def over_seeds(values: Sequence[float], step: float = 0.0) -> OverSeeds:
    """Return the mean of one value per seed with its t interval and t test.

    `step`: of the values, such as one item of an accuracy; equal values have the spread that it may hide.
    """
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return OverSeeds(n, mean, None, None, None, None)
    sd = max(float(np.std(values, ddof=1)), step / math.sqrt(12))
    se = sd / math.sqrt(n)
    half = float(t_half_width(se, n - 1))
    return OverSeeds(n, mean, sd, mean - half, mean + half, float(t_p_value(mean, se, n - 1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values: rejecting those below alpha keeps the chance of any false rejection at most alpha.

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
    """Total number of seeds that would show a difference with the stated power; None: more than `MOST_SEEDS`.

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
    """Return how many seeds would show a true difference of this size; None for one seed, which has no spread.

    `sequential`: by the confidence sequence, which needs more seeds than the t test.
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
    """Return the probability that t of n values exceeds `critical` on the side of their true mean `difference`.

    This is the noncentral t, as a mean over quantiles of the sample variance: scipy's nctdtr is NaN in far tails.
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
    """Return half the width of a confidence sequence for a Gaussian mean after n values; inf while it is unbounded.

    With probability 1 - alpha the intervals after 2, 3, 4, ... values all contain the mean, so that one may look after
    each value and stop for any reason: the Gaussian mixture of Wang and Ramdas, "Anytime-valid t-tests and confidence
    sequences for Gaussian means with unknown variance" (arXiv:2310.03722), after Lai 1976, "On confidence sequences",
    Annals of Statistics 4, 265-280. For a hypothetical mean m and with c^2 = `_MIXTURE`, the ratio

        sqrt(c^2 / (n + c^2)) * (sum (x - m)^2 / (sum (x - m)^2 - (sum (x - m))^2 / (n + c^2)))^(n/2)

    is that of the likelihoods of (x - m) / |x_1 - m| under effect sizes N(0, 1 / c^2) and 0: a martingale of mean 1 if
    m is true, whatever the variance.
    By Ville's inequality it reaches 1 / alpha at any time with probability <= alpha. The interval is all m where it has
    not.
    """
    count = np.asarray(n, dtype=np.float64)
    bound = ((count + _MIXTURE) / (_MIXTURE * alpha**2)) ** (1 / count)
    slack = 1 - bound * _MIXTURE / (count + _MIXTURE)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.sqrt((bound - 1) * (count - 1) / (count * slack))
    return np.where(slack > 0, factor, np.inf) * np.where(slack > 0, sd, 1.0)


def look(values: np.ndarray, *, alpha: float = ALPHA) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and half width of the confidence sequence after each of (..., N) values, one per seed.

    A single seed has no interval.
    """
    n = np.arange(1, values.shape[-1] + 1)
    origin = values[..., :1]  # sums of squares around it keep their digits
    moved = values - origin
    mean = moved.cumsum(axis=-1) / n
    squares = np.maximum((moved**2).cumsum(axis=-1) - n * mean**2, 0)
    sd = np.sqrt(squares / np.maximum(n - 1, 1))
    half = np.where(n > 1, sequence_half_width(sd, np.maximum(n, 2), alpha), np.inf)
    return mean + origin, half


@dataclass(frozen=True)
class Sequential:
    """What a confidence sequence says when it decides, or after the last seed if it never does."""

    decision: Decision | None
    seeds: int  # at the decision, or all
    confidence: float
    mean: float  # of these seeds
    low: float | None  # None: still unbounded
    high: float | None


def decide(values: Sequence[float], *, smallest: float, alpha: float = ALPHA) -> Sequential:
    """Return the first decision along the values, one per seed; later values do not change it.

    They differ if the interval excludes 0, and are equal if it lies within +-smallest.
    """
    looks = zip(*look(np.asarray(values, dtype=np.float64), alpha=alpha), strict=True)
    for seeds, (mean, half) in enumerate(looks, start=1):
        differs, equal = abs(mean) > half, abs(mean) + half < smallest
        if differs or equal or seeds == len(values):
            break
    decision: Decision | None = "differs" if differs else "equal" if equal else None
    ends = (float(mean - half), float(mean + half)) if math.isfinite(half) else (None, None)
    return Sequential(decision, seeds, 1 - alpha, float(mean), *ends)


def first_bounded(alpha: float = ALPHA) -> int:
    """Return the smallest number of seeds for which a confidence sequence is bounded."""
    widths = (sequence_half_width(1.0, n, alpha) for n in itertools.count(2))
    return next(n for n, width in enumerate(widths, start=2) if np.isfinite(width))


# -- groups of tokens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """Sums over the tokens of each unit (document or window) and group, of one source."""

    tokens: np.ndarray  # (U, P) counts
    a: np.ndarray  # (U, P) nats of A
    difference: np.ndarray  # (U, P) nats, B - A


@dataclass(frozen=True)
class Estimates:
    """One quantity of P groups; all (P,). If a single unit decides it, its error is NaN or has 0 degrees of freedom."""

    value: np.ndarray
    se: np.ndarray
    degrees: np.ndarray  # of freedom of the standard error


@dataclass(frozen=True)
class GroupMeans:
    """What is known of P groups."""

    share: np.ndarray  # (P,) of all tokens, by the weights of the sources
    a: np.ndarray  # (P,) mean of A, nats/token
    mean: Estimates  # of B - A
    part: Estimates  # share * mean: all parts add up to the whole
    excess: Estimates  # part - share * whole: what a group contributes beyond its size


def estimate_groups(sources: list[Sums], weights: list[float]) -> GroupMeans:
    """Return the means of groups over sources whose weights add up to 1, each source a stratum of its own.

    Standard errors are the delete-one jackknife over units within each stratum, as in `estimate_mean`. All tokens of a
    unit are deleted together, in the numerator and in the denominator.

    Degrees of freedom are those of each group: within a source Kish's effective n of the group's tokens, minus 1 (of
    all tokens if it has none), and over sources by Satterthwaite's rule, as in `estimate_mean`.
    """
    rows = list(zip(sources, weights, strict=True))
    share = np.sum([w * s.tokens.sum(axis=0) / s.tokens.sum() for s, w in rows], axis=0)
    part = np.sum([w * s.difference.sum(axis=0) / s.tokens.sum() for s, w in rows], axis=0)
    of_a = np.sum([w * s.a.sum(axis=0) / s.tokens.sum() for s, w in rows], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = _group_values(share, part)
        found = [_jackknife(source, w, share, part) for source, w in rows if w != 0]
        variances, degrees = map(np.array, zip(*found, strict=True))  # (S, 3, P), (S, P)
        uncertain = np.where(variances > 0, variances**2 / degrees[:, None], 0).sum(axis=0)
        total = variances.sum(axis=0)
        estimates = map(Estimates, values, np.sqrt(total), total**2 / uncertain)
        return GroupMeans(share, of_a / share, *estimates)


def _group_values(share: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return mean, part and excess, (3, ..., P), of shares and parts, (..., P)."""
    return np.stack([part / share, part, part - share * part.sum(axis=-1, keepdims=True)])


def _jackknife(
    source: Sums, weight: float, share: np.ndarray, part: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the variances of mean, part and excess, (3, P), of one source, and their degrees of freedom, (P,)."""
    units, total = len(source.tokens), source.tokens.sum()
    rest = total - source.tokens.sum(axis=1, keepdims=True)  # (U, 1); 0 for a single unit
    without = [  # share and part without each unit, (U, P) each
        of + weight * ((every.sum(axis=0) - every) / rest - every.sum(axis=0) / total)
        for of, every in ((share, source.tokens), (part, source.difference))
    ]
    moved = _group_values(*without) - _group_values(share, part)[:, None]  # (3, U, P)
    variances = (units - 1) / units * (moved**2).sum(axis=1)
    in_group = np.where(source.tokens.any(axis=0), source.tokens, total - rest)
    degrees = in_group.sum(axis=0) ** 2 / (in_group**2).sum(axis=0) - 1
    return variances if units > 1 else np.full_like(variances, np.nan), degrees
