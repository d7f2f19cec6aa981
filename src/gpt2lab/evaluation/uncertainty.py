"""Means over units that may weigh differently, such as documents, and their standard errors. No torch.

Tokens and windows of one document are correlated: treating them as independent gives standard errors several times too
small. Here a unit is a document (weighted by its tokens), a conversation or a HellaSwag item (weighted equally).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    variances, degrees = [], []
    for units in strata:
        found = estimate_mean(values[units], w[units])
        if found.se is None:
            return None, 0.0
        variances.append((w[units].sum() / w.sum() * found.se) ** 2)
        degrees.append(found.degrees)
    of_all = sum(v**2 / d for v, d in zip(variances, degrees, strict=True))
    return math.sqrt(sum(variances)), sum(variances) ** 2 / of_all if of_all else min(degrees)
