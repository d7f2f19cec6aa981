"""The table of an ablation: the last loss of each setting, and how soon it reached a target. No torch."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.config.request import RunRequest
from gpt2lab.errors import CheckError, SaveError, system_errors_as
from gpt2lab.evaluation.results import Results, file_of_step, read_results
from gpt2lab.evaluation.uncertainty import t_half_width
from gpt2lab.files import is_number, replace_durably
from gpt2lab.lab import over_seeds
from gpt2lab.lab.over_seeds import Comparison
from gpt2lab.runs import history


@dataclass(frozen=True)
class Run:
    """One setting with one seed."""

    setting: str
    seed: int
    request: RunRequest
    argv: tuple[str, ...]  # the trainer's command line

    @property
    def name(self) -> str:
        """The run's folder."""
        return f"{self.setting}_seed{self.seed}"


@dataclass(frozen=True)
class Curve:
    """What one run measured: validation losses, and the tokens and training seconds they took."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, its standard error, and half its 95 % interval by Student's t; both None of a single seed."""

    value: float
    error: float | None
    half_interval: float | None


@dataclass(frozen=True)
class Row:
    """One setting of the table; what some seed did not reach is None.

    Differences and ratios are to the baseline with the same seed, so that their intervals are those of a paired test.
    """

    setting: str
    seeds: int
    diverged: int = 0  # of the seeds; if any did, the setting has no number at all
    tokens: int | None = None
    loss: Mean | None = None
    loss_difference: Mean | None = None  # None if the baseline ended after other tokens
    tokens_to_loss: Mean | None = None
    tokens_ratio: Mean | None = None
    seconds_to_loss: Mean | None = None
    seconds_ratio: Mean | None = None
    reached: int | None = None  # seeds that reached the loss; None if it is not known for each


def finished(own: Sequence[Curve | None]) -> list[Curve] | None:
    """Return a setting's curves, None if a seed diverged: the seeds left are those that the setting chose itself."""
    kept = [curve for curve in own if curve is not None]
    return kept if len(kept) == len(own) else None


def read_curve(run_dir: Path) -> Curve:
    """Return what a complete run measured, without its evaluation before the first step.

    Raises: CheckError if it logged no validation loss that is a number.
    """
    log = history.read_log(run_dir)
    evals, taken = log.current("eval"), log.numbers.tolist()
    tokens = dict(zip(taken, log.column("tokens").astype(int).tolist(), strict=True))
    spent = itertools.accumulate(log.column("step_seconds").tolist())
    seconds = dict(zip(taken, spent, strict=True))
    kept = [s for s in sorted(evals) if s in seconds and is_number(evals[s].get("val_loss"))]
    if not kept:
        raise CheckError(f"{run_dir}: no validation loss was logged")
    return Curve(
        tuple(tokens[step] for step in kept),
        tuple(seconds[step] for step in kept),
        tuple(evals[step]["val_loss"] for step in kept),
    )


def reach(curve: Curve, target: float) -> tuple[float, float] | None:
    """Return (tokens, seconds) at which a curve first comes down to a loss, None if it never does.

    Between two evaluations the loss is taken as a straight line; before the first one nothing is known, so a target
    above the first loss counts as reached there.
    """
    for index, loss in enumerate(curve.losses):
        if loss > target:
            continue
        if index == 0:
            return float(curve.tokens[0]), curve.seconds[0]
        before = curve.losses[index - 1]
        share = (before - target) / (before - loss)
        pairs = (curve.tokens, curve.seconds)
        tokens, seconds = (x[index - 1] + share * (x[index] - x[index - 1]) for x in pairs)
        return tokens, seconds
    return None


def mean(values: Sequence[float]) -> Mean:
    """Return the mean of one value a seed, with its errors."""
    n = len(values)
    if n < 2:
        return Mean(values[0], None, None)
    error = statistics.stdev(values) / n**0.5
    return Mean(statistics.fmean(values), error, float(t_half_width(error, n - 1)))


def compare(curves: Mapping[str, Sequence[Curve | None]], *, target: float | None) -> list[Row]:
    """Return the table of {setting: a curve for each seed, None where it diverged}; the first is the baseline.

    Without a target each seed has its own: the baseline's last loss with that seed. Ratios are to the baseline with
    the same seed. A setting may have fewer seeds than the baseline: its first ones.
    """
    baseline = next(iter(curves.values()))
    targets = [
        target if target is not None or curve is None else curve.losses[-1] for curve in baseline
    ]
    base = [_reach(curve, goal) for curve, goal in zip(baseline, targets, strict=True)]
    if target is None:  # its last loss, which it may have touched before by chance
        base = [(float(c.tokens[-1]), c.seconds[-1]) if c else None for c in baseline]
    rows = []
    for setting, with_diverged in curves.items():
        own = finished(with_diverged)
        if own is None:
            seeds = len(with_diverged)
            rows.append(Row(setting, seeds, with_diverged.count(None)))
            continue
        found = [_reach(curve, goal) for curve, goal in zip(own, targets, strict=False)]
        found = base if with_diverged is baseline else found
        reached = [place for place in found if place is not None]
        pairs = [(a, b) for a, b in zip(found, base, strict=False) if a and b]
        means: list[Mean | None] = []
        for unit in (0, 1):  # tokens, seconds
            means.append(mean([place[unit] for place in reached]) if all(found) else None)
            ratios = [a[unit] / b[unit] for a, b in pairs]
            means.append(mean(ratios) if len(ratios) == len(own) else None)
        tokens, tokens_ratio, seconds, seconds_ratio = means
        difference, whole = None, finished(baseline)
        if whole is not None and own[0].tokens[-1] == whole[0].tokens[-1]:
            difference = mean(differences_of(own, whole))
        last = mean([curve.losses[-1] for curve in own])
        row = (last, difference, tokens, tokens_ratio, seconds, seconds_ratio)
        count = None if None in targets else len(reached)
        rows.append(Row(setting, len(own), 0, own[0].tokens[-1], *row, count))
    return rows


def _reach(curve: Curve | None, target: float | None) -> tuple[float, float] | None:
    return None if curve is None or target is None else reach(curve, target)


def differences_of(own: Sequence[Curve], baseline: Sequence[Curve]) -> list[float]:
    """Return the differences of last losses, seed by seed, of the seeds that the setting has."""
    pairs = zip(own, baseline, strict=False)
    return [mine.losses[-1] - base.losses[-1] for mine, base in pairs]


def write_markdown(
    rows: Sequence[Row], *, target: float | None, until_decided: bool = False
) -> str:
    """Write the table; what stands behind ± is half of a 95 % interval over the seeds."""
    goal = f"loss {target:g}" if target is not None else "the first's last loss"
    header = ("setting", "seeds", "tokens", "last val loss", "difference", f"tokens to {goal}")
    lines = []
    for row in rows:
        missing = "n/a" if row.reached is None else f"not reached ({row.reached} of {row.seeds})"
        last = _diverged(row) if row.diverged else _show(row.loss, "{:.4f}")
        lines.append(
            [
                *(row.setting, str(row.seeds), fmt.number(row.tokens, ","), last),
                _show(row.loss_difference, "{:+.4f}"),
                _show(row.tokens_to_loss, "{:,.0f}") if row.tokens_to_loss else missing,
                _show(row.tokens_ratio, "{:.3f}"),
                _show(row.seconds_to_loss, "{:,.1f}"),
                _show(row.seconds_ratio, "{:.3f}"),
            ]
        )
    note = "±: half of the 95 % interval over seeds (Student's t); differences and ratios are taken seed by seed."
    if until_decided:
        note += (
            " ± does not count that seeds were added until a decision; the confidence sequences do."
        )
    table = fmt.markdown_table([*header, "ratio", "seconds to it", "ratio"], lines)
    return f"{table}\n\n{note}"


def _diverged(row: Row) -> str:
    return f"diverged in {row.diverged} of {fmt.number_of(row.seeds, 'seed')}"


def _show(found: Mean | None, form: str) -> str:
    if found is None:
        return "n/a"
    half = found.half_interval
    return form.format(found.value) + (f" ± {form.format(half).lstrip('+')}" if half else "")


def _last_results(run_dir: Path) -> Results | None:
    """Return a run's last validation, document by document; None where it is not kept."""
    path = file_of_step(run_dir, "validation", max(history.read_log(run_dir).current("eval")))
    return read_results(path) if path.exists() else None


def find_comparisons(
    runs: Sequence[Run],
    with_diverged: Mapping[str, Sequence[Curve | None]],
    out: Path,
    *,
    smallest: float,
    until_decided: bool,
) -> list[Comparison]:
    """Compare the last losses of all settings that ended after the baseline's tokens with the baseline's.

    A setting that diverged in a seed is not compared, but counts as one of those that were to be.
    """
    baseline, *others = with_diverged
    curves = {name: own for name, some in with_diverged.items() if (own := finished(some))}
    if baseline not in curves:
        return []
    kept: dict[str, list[Results | None]] = {}
    for run in runs:
        kept.setdefault(run.setting, []).append(_last_results(out / run.name))
    differences: dict[str, list[float]] = {}
    units: dict[str, over_seeds.OverUnits | None] = {}
    for name in others:
        if name not in curves or curves[name][0].tokens[-1] != curves[baseline][0].tokens[-1]:
            continue
        differences[name] = differences_of(curves[name], curves[baseline])
        count = len(differences[name])
        a, b = ([r for r in kept[side][:count] if r is not None] for side in (baseline, name))
        if len(a) == len(b) == count:
            units[name] = over_seeds.over_units(a, b, "val_loss")
    return over_seeds.compare_all(
        baseline,
        differences,
        units,
        smallest=smallest,
        until_decided=until_decided,
        tests=len(differences) + len(with_diverged) - len(curves),
    )


def diverged_sentences(rows: Sequence[Row]) -> dict[str, str]:
    """Say in a sentence for each setting that diverged what it means for the comparison."""
    baseline, *others = rows
    found = {
        row.setting: f"{row.setting} {_diverged(row)}, so it is not compared with {baseline.setting}."
        for row in others
        if row.diverged
    }
    if baseline.diverged:
        name = baseline.setting
        found[name] = f"{name} {_diverged(baseline)}, so nothing is compared with it."
    return found


def write_comparisons(found: Sequence[Comparison], *, smallest: float) -> str:
    """Write what the differences show: a table of both errors, what they answer, and a sentence a setting."""
    head, *rows = over_seeds.table(found, smallest=smallest)
    unit = next((one.over_units.unit for one in found if one.over_units), "document")
    sentences = "\n".join(f"- {over_seeds.sentence(one, smallest=smallest)}" for one in found)
    questions = over_seeds.QUESTIONS.format(unit=unit)
    return "\n\n".join([fmt.markdown_table(head, rows), questions, sentences])


def write_table(
    runs: Sequence[Run],
    out: Path,
    *,
    target: float | None,
    smallest: float = over_seeds.SMALLEST,
    max_seeds: int | None = None,
) -> tuple[str, dict[str, Any]]:
    """Read what the runs measured, write `ablation.md` and `ablation.json` to `out`, and return both.

    `smallest`: difference in nats that matters. `max_seeds`: with --until_decided, else None.

    Raises: CheckError if a run measured nothing; SaveError.
    """
    curves: dict[str, list[Curve | None]] = {}
    for run in runs:
        run_dir = out / run.name
        curve = None if history.has_diverged(run_dir) else read_curve(run_dir)
        curves.setdefault(run.setting, []).append(curve)
    rows = compare(curves, target=target)
    flags = {run.setting: list(run.argv) for run in reversed(runs)}  # of the first seed
    settings = [
        asdict(row)
        | {
            "command": flags[row.setting],
            "curves": [curve and asdict(curve) for curve in curves[row.setting]],
        }
        for row in rows
    ]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    until_decided = max_seeds is not None
    comparisons = find_comparisons(
        runs, curves, out, smallest=smallest, until_decided=until_decided
    )
    logs = [history.read_log(out / run.name) for run in runs]
    spent = {
        "seeds": len(seeds),
        "max_seeds": max_seeds,
        "runs": len(runs),
        "tokens": sum(int(max(log.column("tokens"), default=0)) for log in logs),
        "step_seconds": sum(float(log.column("step_seconds").sum()) for log in logs),
    }
    diverged = diverged_sentences(rows)
    parts = [write_markdown(rows, target=target, until_decided=until_decided)]
    parts += [write_comparisons(comparisons, smallest=smallest)] if comparisons else []
    parts += ["\n".join(f"- {sentence}" for sentence in diverged.values())] if diverged else []
    markdown = "\n\n".join([*parts, _spent_line(spent, comparisons)])
    as_json = {
        "target_loss": target,
        "seeds": seeds,
        "settings": settings,
        "smallest_difference": smallest,
        "unit": "nats/token",
        "comparisons": [
            asdict(one) | {"sentence": over_seeds.sentence(one, smallest=smallest)}
            for one in comparisons
        ],
        "diverged": diverged,
        "spent": spent,
    }
    with system_errors_as(SaveError, out, fix="choose another --out"):
        replace_durably(out / "ablation.md", markdown + "\n")
        replace_durably(out / "ablation.json", json.dumps(as_json, indent=1) + "\n")
    return markdown, as_json


def _spent_line(spent: dict[str, Any], comparisons: Sequence[Comparison]) -> str:
    seeds = fmt.number_of(spent["seeds"], "seed")
    if spent["max_seeds"]:
        seeds = f"{spent['seeds']} of at most {spent['max_seeds']} seeds"
    line = (
        f"Spent: {seeds}, {fmt.number_of(spent['runs'], 'run')}, {spent['tokens']:,} tokens, "
        f"{fmt.duration(spent['step_seconds'])} of training steps."
    )
    undecided = [one.setting for one in comparisons if one.verdict == "not decided"]
    if undecided and spent["seeds"] == spent["max_seeds"]:
        line += f" The budget ended before {', '.join(undecided)} could be decided; a larger --max_seeds goes on."
    return line
