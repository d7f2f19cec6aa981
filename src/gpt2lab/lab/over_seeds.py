"""Settings trained with the same seeds: the error over seeds and the error over documents, side by side. No torch.

The two answer different questions and are never added. Over seeds: would other seeds show the difference as well, on
the same documents? Over documents: would other documents show it as well, with the same trained models?
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpt2lab import fmt
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.lab import stats

SMALLEST = 0.01  # nats per token: a difference that is worth more seeds
QUESTIONS = (
    "Over seeds: would other seeds show the difference as well, on the same {unit}s? "
    "Over {unit}s: would other {unit}s show it as well, with the same trained models? "
    "Neither error includes the other; they are not added. "
    "Differences over seeds are paired by seed and assumed Gaussian."
)

LOSS = "val_loss"  # the only metric that is known to be better when lower
# Of other metrics: higher or lower.
Verdict = Literal["better", "worse", "higher", "lower", "equal", "not decided"]


@dataclass(frozen=True)
class OverUnits:
    """The difference of the means over seeds, estimated over the units of an evaluation, such as documents."""

    unit: str
    n: int
    effective_n: float
    paired: bool  # both settings were evaluated on the same units
    mean: float
    low: float | None  # 95 % interval, clustered by unit; None if fewer than two units decide it
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """A setting against a baseline: differences are setting - baseline, of a loss in nats per token."""

    setting: str
    baseline: str
    over_seeds: stats.OverSeeds
    over_units: OverUnits | None  # None if the runs keep no results by unit
    p_holm: float | None  # of `over_seeds`, adjusted for all settings; None for a single seed
    seeds_needed: stats.SeedsNeeded | None
    # With --until_decided. Then the t interval and test of `over_seeds` are not valid: the data chose the seeds.
    sequential: stats.Sequential | None
    verdict: Verdict
    metric: str = LOSS


def over_units(a: Sequence[Results], b: Sequence[Results], metric: str) -> OverUnits | None:
    """Return the difference b - a of the means over runs, clustered by unit.

    If both settings were evaluated on the same units, these are paired; otherwise the squared errors add up, as for two
    independent sets. None if the runs of one setting have different units.
    """
    if any(r.units != runs[0].units for runs in (a, b) for r in runs):
        return None
    means = [np.mean([r.per_unit[metric] for r in runs], axis=0) for runs in (a, b)]
    paired = a[0].units == b[0].units
    if paired:
        parts = [estimate_mean(means[1] - means[0], a[0].weights, a[0].strata)]
        mean = parts[0].mean
    else:
        parts = [
            estimate_mean(m, r[0].weights, r[0].strata) for m, r in zip(means, (a, b), strict=True)
        ]
        mean = parts[1].mean - parts[0].mean
    effective = min(part.effective_n for part in parts)
    known = [part.se for part in parts if part.se is not None]
    low = high = None
    degrees = min(part.degrees for part in parts)
    if len(known) == len(parts) and degrees >= stats.LEAST_DEGREES:
        half = float(stats.t_half_width(math.hypot(*known), degrees))
        low, high = mean - half, mean + half
    return OverUnits(a[0].unit, min(a[0].n, b[0].n), effective, paired, mean, low, high)


def compare_all(
    baseline: str,
    differences: Mapping[str, Sequence[float]],
    units: Mapping[str, OverUnits | None],
    *,
    smallest: float = SMALLEST,
    until_decided: bool = False,
    tests: int | None = None,
    metric: str = LOSS,
    step: float = 0.0,
) -> list[Comparison]:
    """Compare settings with a baseline, given {setting: its differences, one per seed}.

    Settings that were not evaluated on the same units differ only if that shows over units too, and are never equal:
    over seeds, the difference of the texts is the same for all.
    The t tests are corrected by Holm. Confidence sequences, power and equality use alpha / tests (Bonferroni).
    `tests`: number of settings that were to be compared, if more than these; one that diverged has p = 1.
    `step`: of the differences, see `stats.over_seeds`.
    """
    tests = max(1, tests or len(differences))
    alpha = stats.ALPHA / tests
    found = {name: stats.over_seeds(values, step) for name, values in differences.items()}
    tested = {n: one.p for n, one in found.items() if one.p is not None and not until_decided}
    p_values = [*tested.values(), *[1.0] * (tests - len(differences))]
    adjusted = dict(zip(tested, stats.holm(p_values), strict=False))
    comparisons = []
    for name, seeds in found.items():
        need = stats.seeds_needed(seeds, smallest, alpha=alpha, sequential=until_decided)
        sequential = None
        if until_decided:
            sequential = stats.decide(differences[name], smallest=smallest, alpha=alpha)
            differs, equal = sequential.decision == "differs", sequential.decision == "equal"
        else:
            differs = adjusted.get(name, 1.0) < stats.ALPHA
            equal = False
            if seeds.se is not None:
                half = stats.t_half_width(seeds.se, seeds.seeds - 1, alpha)
                equal = bool(abs(seeds.mean) + half < smallest)
        of_units = units.get(name)
        if of_units is not None and not of_units.paired:
            is_open = (
                of_units.low is None or of_units.high is None or of_units.low <= 0 <= of_units.high
            )
            differs, equal = differs and not is_open, False
        lower = (sequential.mean if sequential else seeds.mean) < 0
        verdict: Verdict = "equal" if equal else "not decided"
        if differs:
            words: tuple[Verdict, Verdict] = ("higher", "lower")
            verdict = (words if metric != LOSS else ("worse", "better"))[lower]
        comparisons.append(
            Comparison(
                *(name, baseline, seeds, of_units, adjusted.get(name), need, sequential),
                *(verdict, metric),
            )
        )
    return comparisons


def sentence(found: Comparison, *, smallest: float = SMALLEST) -> str:
    """Return what a comparison shows, in one sentence."""
    of = "" if found.metric == LOSS else f"{found.metric}: "
    return f"{of}{_verdict(found, smallest)}{_on_other_units(found.over_units)}."


def _unit(found: Comparison) -> str:
    return " nats" if found.metric == LOSS else ""


def _verdict(found: Comparison, smallest: float) -> str:
    seeds, sequential = found.over_seeds, found.sequential
    name, baseline = found.setting, found.baseline
    if seeds.low is None or seeds.high is None:
        return (
            f"not decided: {name} - {baseline} is {seeds.mean:+.4f}{_unit(found)} with one seed, which says nothing "
            f"about other seeds"
        )
    mean, low, high = seeds.mean, seeds.low, seeds.high
    what, over = "95 % interval", f"over {seeds.seeds} seeds"
    if sequential is not None:
        over = f"after {fmt.number_of(sequential.seeds, 'seed')}"
        if sequential.low is None or sequential.high is None:
            return f"not decided: {name} - {baseline} is {mean:+.4f}{_unit(found)} {over}, too few for an interval"
        mean, low, high = sequential.mean, sequential.low, sequential.high
        what = f"{100 * sequential.confidence:.4g} % confidence sequence"
    if found.verdict not in ("equal", "not decided"):
        if found.verdict in ("better", "lower"):
            mean, low, high = -mean, -high, -low
        by, low_end, high_end = _numbers(mean, low, high)
        by += f"{_unit(found)} ({what} {low_end} to {high_end} {over})"
        return f"{name} is {found.verdict} than {baseline} by {by}"
    shown, low_end, high_end = _numbers(mean, low, high, sign="+")
    interval = f"{what} {low_end} to {high_end} {over}"
    if found.verdict == "equal":
        return f"{name} and {baseline} differ by less than {smallest:g}{_unit(found)} ({interval})"
    if found.over_units is not None and not found.over_units.paired:
        why = f"each was measured on its own {found.over_units.unit}s, and seeds cannot show what that changes"
        return f"not decided: {name} - {baseline} is {shown}{_unit(found)} ({interval}); {why}"
    if sequential is None and not low <= 0 <= high:
        interval += f"; corrected for all settings, p is {found.p_holm:.2g}"
    elif sequential is None and max(-low, high) < smallest:
        interval += "; corrected for all settings, it is wider"
    return (
        f"not decided: {name} - {baseline} is {shown}{_unit(found)} ({interval}); {_power(found)}"
    )


def _power(found: Comparison) -> str:
    need, had = found.seeds_needed, found.over_seeds.seeds
    assert need is not None  # of several seeds it is known
    size = f"{need.difference:g}{_unit(found)}"
    what = f"would show a difference of {size} in {100 * need.power:.0f} % of cases"
    if need.seeds is None:
        return f"only more than {stats.MOST_SEEDS:,} seeds {what}"
    if need.seeds <= had:
        return f"{need.seeds} seeds {what}"
    return (
        f"about {need.seeds:,} seeds {what} (between {_count(need.low)} and {_count(need.high)}: "
        f"{had} seeds estimate the spread only roughly)"
    )


def _count(seeds: int | None) -> str:
    return f"more than {stats.MOST_SEEDS:,}" if seeds is None else f"{seeds:,}"


def _on_other_units(found: OverUnits | None) -> str:
    if found is None:
        return ""
    units = fmt.number_of(found.n, found.unit)
    if found.low is None or found.high is None:
        return f"; {units} cannot show what others would"
    low, high = _numbers(found.low, found.high, sign="+")
    is_open = ", either sign is possible" if found.low <= 0 <= found.high else ""
    others = "" if found.paired else ", not paired"
    return f"; on other {found.unit}s {low} to {high} (95 %, {units}{others}){is_open}"


def unit_of(found: Sequence[Comparison]) -> str:
    """Name the unit of the first comparison over units, a document if there is none."""
    return next((one.over_units.unit for one in found if one.over_units), "document")


def comparison_table(found: Sequence[Comparison], *, smallest: float = SMALLEST) -> list[list[str]]:
    """Return the header and the rows of a table of comparisons."""
    unit = unit_of(found)
    sequential = any(one.sequential for one in found)
    header = ["setting", "verdict", "seeds", "difference, nats"]
    header += ["confidence sequence"] if sequential else ["95 % over seeds", "p (Holm)"]
    header += [f"95 % over {unit}s", f"{unit}s", f"seeds to see {smallest:g}"]
    rows = [header]
    for one in found:
        seeds, units, need = one.over_seeds, one.over_units, one.seeds_needed
        shown = one.sequential or seeds
        row = [one.setting, one.verdict, str(shown.seeds), f"{shown.mean:+.4f}"]
        if one.sequential:
            row.append(_show(one.sequential.low, one.sequential.high))
        else:
            row += [_show(seeds.low, seeds.high), fmt.number(one.p_holm, ".2g")]
        row += [_show(units.low, units.high), f"{units.n:,}"] if units else ["n/a", "n/a"]
        answer = "n/a"
        if need is not None:
            answer = _count(need.seeds)
            answer += f" ({_count(need.low)} to {_count(need.high)})" if need.low else ""
        rows.append([*row, answer])
    return rows


def _show(low: float | None, high: float | None) -> str:
    return "n/a" if low is None or high is None else " to ".join(_numbers(low, high, sign="+"))


def _numbers(*values: float, sign: str = "") -> list[str]:
    """Format numbers with two significant digits of their range, at least two decimals."""
    width = max(values) - min(values)
    digits = 4 if width <= 0 else min(6, max(2, 1 - math.floor(math.log10(width))))
    return [f"{value:{sign}.{digits}f}" for value in values]
