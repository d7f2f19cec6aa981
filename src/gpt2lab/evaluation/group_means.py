"""Means of groups of tokens and their parts of a whole, with standard errors that count documents. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sums:
    """Sums over the tokens of each unit (document or window) and group, of one source."""

    tokens: np.ndarray  # (U, P) counts
    a: np.ndarray  # (U, P) nats of A
    difference: np.ndarray  # (U, P) nats, B - A


@dataclass(frozen=True)
class GroupMeans:
    """What is known of P groups; all (P,). Errors are NaN where a single unit decides."""

    share: np.ndarray  # of all tokens, by the weights of the sources
    a: np.ndarray  # mean of A, nats/token
    mean: np.ndarray  # of B - A
    mean_se: np.ndarray
    part: np.ndarray  # share * mean: all parts add up to the whole
    part_se: np.ndarray
    excess: np.ndarray  # part - share * whole: what a group has beyond its size
    excess_se: np.ndarray
    effective_n: np.ndarray  # of equally large units that would weigh as much in the group


def estimate_groups(sources: list[Sums], weights: list[float]) -> GroupMeans:
    """Return the means of groups over sources whose weights add up to 1, each source a stratum of its own.

    Standard errors are the delete-one jackknife over units within each stratum, as that of the whole loss: MacKinnon,
    Nielsen and Webb 2023, CV3. All tokens of a unit leave together, in the numerator and in the denominator.
    """
    totals = [source.tokens.sum() for source in sources]
    rows = list(zip(sources, weights, totals, strict=True))
    share = np.sum([w * s.tokens.sum(axis=0) / n for s, w, n in rows], axis=0)
    part = np.sum([w * s.difference.sum(axis=0) / n for s, w, n in rows], axis=0)
    of_a = np.sum([w * s.a.sum(axis=0) / n for s, w, n in rows], axis=0)
    whole = part.sum()
    variances = np.zeros((3, len(share)))
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
            for row, by in enumerate(moved):
                variances[row] += (units - 1) / units * (by**2).sum(axis=0)
            if units < 2:
                variances[:] = np.nan
        mean_se, part_se, excess_se = np.sqrt(variances)
        of_units = np.concatenate([w * s.tokens / n for s, w, n in rows])
        effective = of_units.sum(axis=0) ** 2 / (of_units**2).sum(axis=0)
        return GroupMeans(
            share=share,
            a=of_a / share,
            mean=mean,
            mean_se=mean_se,
            part=part,
            part_se=part_se,
            excess=part - share * whole,
            excess_se=excess_se,
            effective_n=effective,
        )
