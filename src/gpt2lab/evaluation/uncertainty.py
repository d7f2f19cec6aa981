"""Standard errors, tests and intervals of means over units that may weigh differently, such as documents. No torch.

Tokens and windows of one document resemble each other, so that taking them as independent gives errors several times
too small. Here a unit is a document (weighted by its tokens), a conversation or a HellaSwag item (weighted equally).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALPHA = 0.05  # 1 - confidence
_EXACT_UNITS = 12  # up to here all 2^n signs are tried; beyond, Student's t is close


@dataclass(frozen=True)
class Estimate:
    """A weighted mean, its standard error (None of a single unit), and how many equal units would weigh as much."""

    mean: float
    se: float | None
    effective_n: float
    degrees: float  # of freedom of mean / se


def estimate_mean(
    values: np.ndarray, weights: np.ndarray | None = None, strata: Sequence[slice] = ()
) -> Estimate:
    """Return the mean of (n,) unit means with (n,) weights, default equal.

    `strata`: the units of each source of a mixture; its weights are fixed, so that only what differs within a source
    counts, and variances add up by the squares of the weights (Cochran 1977, "Sampling Techniques", 5.3), degrees of
    freedom by Satterthwaite's rule (5.4).

    The standard error is the delete-one jackknife of the ratio sum(w v) / sum(w), which for equal weights is
    s / sqrt(n): MacKinnon, Nielsen and Webb 2023, "Fast and reliable jackknife and bootstrap methods for
    cluster-robust inference", CV3. The effective n is Kish's (sum w)^2 / sum w^2.
    """
    w = np.ones(len(values)) if weights is None else weights.astype(np.float64)
    total, n = w.sum(), len(values)
    mean = float((w * values).sum() / total)
    effective_n = float(total**2 / (w**2).sum())
    if len(strata) > 1:
        se, degrees = _of_strata(values, w, strata)
        return Estimate(mean, se, effective_n, degrees)
    if n < 2:
        return Estimate(mean, None, effective_n, 0.0)
    without = w * (mean - values) / (total - w)  # how the mean moves without each unit
    se = math.sqrt((n - 1) / n * (without**2).sum())
    return Estimate(mean, se, effective_n, effective_n - 1)


def _of_strata(
    values: np.ndarray, w: np.ndarray, strata: Sequence[slice]
) -> tuple[float | None, float]:
    """Return standard error and degrees of freedom of a weighted mean over strata."""
    variances, degrees = [], []
    for units in strata:
        found = estimate_mean(values[units], w[units])
        if found.se is None:
            return None, 0.0
        variances.append((w[units].sum() / w.sum() * found.se) ** 2)
        degrees.append(found.degrees)
    of_all = sum(v**2 / d for v, d in zip(variances, degrees, strict=True))
    return math.sqrt(sum(variances)), sum(variances) ** 2 / of_all if of_all else min(degrees)


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

    McNemar's test: only items that one of them alone gets right tell, and each is a toss of a fair coin.
    """
    from scipy.special import bdtr

    wins, losses = int((of_b > of_a).sum()), int((of_b < of_a).sum())
    if wins == losses:
        return 1.0
    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


# -- groups of tokens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """Sums over the tokens of each unit (document or window) and group, of one source."""

    tokens: np.ndarray  # (U, P) counts
    a: np.ndarray  # (U, P) nats of A
    difference: np.ndarray  # (U, P) nats, B - A


@dataclass(frozen=True)
class GroupMeans:
    """What is known of P groups; all (P,). Where a single unit decides, errors are NaN or have 0 degrees of freedom."""

    share: np.ndarray  # of all tokens, by the weights of the sources
    a: np.ndarray  # mean of A, nats/token
    mean: np.ndarray  # of B - A
    mean_se: np.ndarray
    part: np.ndarray  # share * mean: all parts add up to the whole
    part_se: np.ndarray
    excess: np.ndarray  # part - share * whole: what a group has beyond its size
    excess_se: np.ndarray
    mean_degrees: np.ndarray  # of freedom of these errors
    part_degrees: np.ndarray
    excess_degrees: np.ndarray


def estimate_groups(sources: list[Sums], weights: list[float]) -> GroupMeans:
    """Return the means of groups over sources whose weights add up to 1, each source a stratum of its own.

    Standard errors are the delete-one jackknife over units within each stratum, as in `estimate_mean`. All tokens of a
    unit leave together, in the numerator and in the denominator.

    Degrees of freedom are those of each group: in a source Kish's effective n of the group's tokens, minus 1 (of all
    tokens where it has none), and over sources by Satterthwaite's rule, as in `estimate_mean`.
    """
    totals = [source.tokens.sum() for source in sources]
    rows = list(zip(sources, weights, totals, strict=True))
    share = np.sum([w * s.tokens.sum(axis=0) / n for s, w, n in rows], axis=0)
    part = np.sum([w * s.difference.sum(axis=0) / n for s, w, n in rows], axis=0)
    of_a = np.sum([w * s.a.sum(axis=0) / n for s, w, n in rows], axis=0)
    whole = part.sum()
    of_sources, of_degrees = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = part / share
        for source, weight, total in rows:
            if weight == 0:
                continue
            units = len(source.tokens)
            rest = total - source.tokens.sum(axis=1, keepdims=True)  # (U, 1); 0 of a single unit
            without = [
                of + weight * ((every.sum(axis=0) - every) / rest - every.sum(axis=0) / total)
                for of, every in ((share, source.tokens), (part, source.difference))
            ]  # share and part without each unit, (U, P) each
            moved = [
                without[1] / without[0] - mean,
                without[1] - part,
                without[1]
                - without[0] * without[1].sum(axis=1, keepdims=True)
                - (part - share * whole),
            ]
            of_sources.append([(units - 1) / units * (by**2).sum(axis=0) for by in moved])
            in_group = np.where(source.tokens.any(axis=0), source.tokens, total - rest)
            of_degrees.append(in_group.sum(axis=0) ** 2 / (in_group**2).sum(axis=0) - 1)
            if units < 2:
                of_sources[-1] = [np.full(len(share), np.nan)] * 3
        variances, degrees = np.array(of_sources), np.array(of_degrees)  # (S, 3, P), (S, P)
        mean_se, part_se, excess_se = np.sqrt(variances.sum(axis=0))
        uncertain = np.where(variances > 0, variances**2 / degrees[:, None], 0).sum(axis=0)
        mean_degrees, part_degrees, excess_degrees = variances.sum(axis=0) ** 2 / uncertain
        return GroupMeans(
            share=share,
            a=of_a / share,
            mean=mean,
            mean_se=mean_se,
            part=part,
            part_se=part_se,
            excess=part - share * whole,
            excess_se=excess_se,
            mean_degrees=mean_degrees,
            part_degrees=part_degrees,
            excess_degrees=excess_degrees,
        )
