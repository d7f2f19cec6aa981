"""An ablation: the table of its settings, and adding seeds until all settings are decided. No torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2lab import fmt
from gpt2lab.errors import CheckError, ConfigError, SaveError, system_errors_as
from gpt2lab.evaluation.results import Results, file_of_step, read_results
from gpt2lab.files import is_number, replace_durably
from gpt2lab.lab.over_seeds import (
    QUESTIONS,
    SMALLEST,
    Comparison,
    OverUnits,
    compare_all,
    comparison_table,
    over_units,
    sentence,
    unit_of,
)
from gpt2lab.lab.seed_runs import (
    Machine,
    SeedRun,
    Setting,
    check_runs,
    outlook_of,
    plan_runs,
    prefix_errors,
    require_own_settings,
    run_all,
)
from gpt2lab.lab.stats import ALPHA, OverSeeds, decide, first_bounded, over_seeds
from gpt2lab.runs import history
from gpt2lab.runs.console import say

MAX_SEEDS = 20  # default of --max_seeds
_LEAST_POINTS = 3  # of a curve: the start, the end, and one between them


@dataclass(frozen=True)
class Ablation:
    """Settings to compare, of which the first is the baseline, and how."""

    settings: Mapping[str, Setting]
    out: Path  # folder of the runs and of the table
    target: float | None = None  # validation loss to reach; None: the baseline's last one
    smallest: float = SMALLEST  # nats/token; an interval within +- it that holds 0 is "equal"
    max_seeds: int | None = None  # add seeds until all settings are decided, at most so many
    jobs: int = 1
    machine: Machine = field(default_factory=Machine)
    # Of settings with code of their own, also of those that need no seeds: see `other_code`.
    code: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, seeds: Sequence[int]) -> list[SeedRun]:
        """Train what is not complete and return the runs, seed by seed.

        Raises: ConfigError, DataError, CheckError, SavedInterrupt: see `plan_runs`, `check_runs` and `run_all`.
        """
        if len(self.settings) < 2:  # no change touches the arithmetic
            return []
        if self.max_seeds is not None:
            return self._run_until_decided(seeds, self.max_seeds)
        runs = self._plan(seeds)
        self._train(runs, [])
        return runs

    def _run_until_decided(self, seeds: Sequence[int], max_seeds: int) -> list[SeedRun]:
        """Train seed after seed until each setting is decided or the seeds are spent.

        The first round has the given seeds, or the fewest that can decide if those are more; later rounds add one, or
        as many as there are jobs for. That changes no decision: a confidence sequence holds after every seed, and the
        first decision along the seeds counts. A setting that is decided or diverged gets no more seeds; if the
        baseline diverged, nothing is left to decide.

        Raises: ConfigError also if a setting trains on fewer or more tokens than the baseline.
        """
        every = all_seeds(seeds, max_seeds, settings=len(self.settings))
        _reject_unequal_tokens(self._plan(every[:1]))
        baseline, *undecided = self.settings
        alpha = ALPHA / len(undecided)
        losses: dict[str, list[float]] = {setting: [] for setting in self.settings}
        done: list[SeedRun] = []
        begin, end = 0, max(len(seeds), first_bounded(alpha))
        while True:
            wanted = (baseline, *undecided)
            new = [run for run in self._plan(every[begin:end]) if run.setting in wanted]
            self._train(new, done)
            done += new
            diverged = {run.setting for run in new if history.has_diverged(run.folder)}
            for run in new:
                if run.setting not in diverged:
                    losses[run.setting].append(read_curve(run.folder).losses[-1])
            undecided = [
                setting
                for setting in undecided
                if not {setting, baseline} & diverged
                and self._is_undecided(losses[setting], losses[baseline], alpha)
            ]
            if not undecided or end == len(every):
                return done
            say(f"after {end} of at most {len(every)} seeds, not decided: {', '.join(undecided)}")
            begin, end = end, min(len(every), end + max(1, self.jobs // (1 + len(undecided))))

    def _is_undecided(self, own: list[float], baseline: list[float], alpha: float) -> bool:
        differences = [a - b for a, b in zip(own, baseline, strict=True)]
        return decide(differences, smallest=self.smallest, alpha=alpha).decision is None

    def _plan(self, seeds: Sequence[int]) -> list[SeedRun]:
        runs = plan_runs(self.settings, seeds=seeds, out=self.out)
        check_runs(runs)
        for run in runs:
            if run.code is None:  # its own program decides what it continues
                with prefix_errors(run.setting):
                    require_own_settings(run, "eval_freq")  # tokens to a loss are read off it
        return runs

    def _train(self, new: Sequence[SeedRun], before: Sequence[SeedRun]) -> None:
        run_all(
            new,
            jobs=self.jobs,
            machine=self.machine,
            refresh=lambda done: self.write([*before, *done]),
            on_divergence="continue",
        )

    def write(self, runs: Sequence[SeedRun]) -> tuple[str, dict[str, Any]]:
        """Read the results of complete runs, write `ablation.md` and `ablation.json`, and return both.

        Raises: CheckError if a run has no validation loss; SaveError.
        """
        curves: dict[str, list[Curve | None]] = {}
        for run in runs:
            curve = None if history.has_diverged(run.folder) else read_curve(run.folder)
            curves.setdefault(run.setting, []).append(curve)
        rows = compare(curves, target=self.target) if runs else []
        until_decided = self.max_seeds is not None
        comparisons = self._compare_all(runs, curves)
        logs = [history.read_log(run.folder) for run in runs]
        spent = {
            "seeds": len({run.seed for run in runs}),
            "max_seeds": self.max_seeds,
            "runs": len(runs),
            "tokens": sum(int(max(log.column("tokens"), default=0)) for log in logs),
            "step_seconds": sum(log.seconds_in_steps() for log in logs),
        }
        diverged = diverged_sentences(rows)
        verdicts: dict[str, str] = {one.setting: one.verdict for one in comparisons}
        verdicts |= dict.fromkeys(diverged, "diverged")
        verdicts |= {n: "equal bits" for n, own in self.code.items() if own.get("same_arithmetic")}
        code = {n: {"verdict": verdicts.get(n)} | own for n, own in self.code.items()}
        parts = [
            "\n".join(f"- {said}" for own in code.values() for said in own.get("sentences", [])),
            write_markdown(rows, target=self.target, until_decided=until_decided) if rows else "",
            write_comparisons(comparisons, smallest=self.smallest) if comparisons else "",
            "\n".join(f"- {line}" for line in [*diverged.values(), *unequal_sentences(rows)]),
            _spent_line(spent, comparisons) if rows else "",
        ]
        markdown = "\n\n".join(filter(None, parts))
        words = {run.setting: run.trainer_words() for run in reversed(runs)}  # of the first seed
        document = {
            "target_loss": self.target,
            "seeds": list(dict.fromkeys(run.seed for run in runs)),
            "settings": [
                row_as_json(row)
                | {
                    "command": words[row.setting],
                    "curves": [curve and asdict(curve) for curve in curves[row.setting]],
                }
                for row in rows
            ],
            "smallest_difference": self.smallest,
            "unit": "nats/token",
            "comparisons": [
                asdict(one) | {"sentence": sentence(one, smallest=self.smallest)}
                for one in comparisons
            ],
            "diverged": diverged,
            "spent": spent,
            "code": code,
        }
        with system_errors_as(SaveError, self.out, fix="choose another --out"):
            replace_durably(self.out / "ablation.md", markdown + "\n")
            replace_durably(self.out / "ablation.json", json.dumps(document, indent=1) + "\n")
        return markdown, document

    def _compare_all(
        self, runs: Sequence[SeedRun], curves: Mapping[str, Sequence[Curve | None]]
    ) -> list[Comparison]:
        """Compare the last losses of all settings that trained on as many tokens as the baseline with the baseline's.

        A setting that diverged in a seed is not compared, but counts in the correction for several tests.
        """
        differences = last_differences(curves)
        if not differences:
            return []
        baseline = next(iter(differences))
        del differences[baseline]
        kept: dict[str, list[Results | None]] = {}
        for run in runs:  # their last validation losses by document
            last = max(history.read_log(run.folder).current("eval"))
            path = file_of_step(run.folder, "validation", last)
            kept.setdefault(run.setting, []).append(read_results(path) if path.exists() else None)
        units: dict[str, OverUnits | None] = {}
        for name, by_seed in differences.items():
            count = len(by_seed)
            a, b = ([r for r in kept[side][:count] if r is not None] for side in (baseline, name))
            if len(a) == len(b) == count:
                units[name] = over_units(a, b, "val_loss")
        return compare_all(
            baseline,
            differences,
            units,
            smallest=self.smallest,
            until_decided=self.max_seeds is not None,
            tests=len(differences) + sum(None in own for own in curves.values()),
        )


def all_seeds(seeds: Sequence[int], max_seeds: int, *, settings: int) -> list[int]:
    """Return every seed that the budget allows: the given ones, then the numbers after the largest of them.

    Raises: ConfigError if the budget is too small to decide anything.
    """
    if max_seeds < len(seeds):
        raise ConfigError(f"--max_seeds {max_seeds} is less than the {len(seeds)} seeds of --seeds")
    if max_seeds < (fewest := first_bounded(ALPHA / (settings - 1))):
        raise ConfigError(
            f"--max_seeds {max_seeds}: with {settings} settings nothing can be decided before {fewest} seeds"
        )
    more = range(max(seeds) + 1, max(seeds) + 1 + max_seeds - len(seeds))
    return [*seeds, *more]


def _reject_unequal_tokens(runs: Sequence[SeedRun]) -> None:
    """Reject settings that train on other numbers of tokens than the baseline, whose last losses are not comparable."""
    tokens = [outlook_of(run)[1] for run in runs]
    for run, count in zip(runs, tokens, strict=True):
        if count != tokens[0]:
            raise ConfigError(
                f"--until_decided compares last losses at equal tokens, but {run.setting} ends after {count:,} and "
                f"{runs[0].setting} after {tokens[0]:,}; give both the same, or leave --until_decided out"
            )


@dataclass(frozen=True)
class Curve:
    """The validation losses of one run, and the tokens and training seconds until each."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


def finished(own: Sequence[Curve | None]) -> list[Curve] | None:
    """Return a setting's curves; None if a seed diverged, because the others would be a selected sample."""
    kept = [curve for curve in own if curve is not None]
    return kept if len(kept) == len(own) else None


def read_curve(run_dir: Path) -> Curve:
    """Return the curve of a complete run, from its evaluation before the first step.

    Raises: CheckError if it logged no finite validation loss after a step.
    """
    log = history.read_log(run_dir)
    evals, taken = log.current("eval"), {0, *log.numbers.tolist()}
    kept = [s for s in sorted(evals) if s in taken and is_number(evals[s].get("val_loss"))]
    if not any(kept):
        raise CheckError(
            f"{run_dir}: no validation loss was logged; remove that folder to train it again"
        )
    rows = np.searchsorted(log.numbers, kept, side="right")  # with nothing before the first step
    tokens, seconds = log.column("tokens"), log.column("step_seconds").cumsum()
    return Curve(
        tuple(np.append(0, tokens)[rows].astype(int).tolist()),
        tuple(np.append(0, seconds)[rows].tolist()),
        tuple(evals[step]["val_loss"] for step in kept),
    )


def reach(curve: Curve | None, target: float | None) -> tuple[float, float] | None:
    """Return (tokens, seconds) at which a curve first reaches a loss; None if it never does, or if one is unknown.

    The loss is interpolated linearly between evaluations; a target above the first loss counts as reached there.
    """
    if curve is None or target is None:
        return None
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


@dataclass(frozen=True)
class TableRow:
    """One setting of the table; what a seed did not reach is None.

    Differences and ratios are to the baseline with the same seed, so that their intervals are those of a paired test.
    """

    setting: str
    seeds: int
    diverged: int = 0  # number of seeds; if any diverged, the setting has no numbers at all
    tokens: int | None = None
    loss: OverSeeds | None = None
    loss_difference: OverSeeds | None = None  # None if the baseline ended after other tokens
    tokens_to_loss: OverSeeds | None = None
    tokens_ratio: OverSeeds | None = None
    seconds_to_loss: OverSeeds | None = None
    seconds_ratio: OverSeeds | None = None
    reached: int | None = None  # seeds that reached the loss; None if it is unknown for one


def compare(
    curves: Mapping[str, Sequence[Curve | None]], *, target: float | None
) -> list[TableRow]:
    """Return the table of {setting: a curve per seed, None where it diverged}; the first setting is the baseline.

    Without a target each seed has its own: the baseline's last loss with that seed. Ratios are to the baseline with
    the same seed. A setting may have fewer seeds than the baseline: its first ones. What a run needed to reach its
    loss is unknown if any was measured at its ends alone.
    """
    baseline, of_all = next(iter(curves.values())), itertools.chain(*curves.values())
    targets = [
        target if target is not None or curve is None else curve.losses[-1] for curve in baseline
    ]
    if any(curve is not None and len(curve.losses) < _LEAST_POINTS for curve in of_all):
        targets = [None] * len(baseline)
    base = [reach(curve, goal) for curve, goal in zip(baseline, targets, strict=True)]
    differences = last_differences(curves)
    rows = []
    for setting, of_seeds in curves.items():
        own = finished(of_seeds)
        if own is None:
            rows.append(TableRow(setting, len(of_seeds), of_seeds.count(None)))
            continue
        found = [reach(curve, goal) for curve, goal in zip(own, targets, strict=False)]
        tokens, tokens_ratio = _over_reached(found, base, unit=0)
        seconds, seconds_ratio = _over_reached(found, base, unit=1)
        rows.append(
            TableRow(
                setting=setting,
                seeds=len(own),
                tokens=own[0].tokens[-1],
                loss=over_seeds([curve.losses[-1] for curve in own]),
                loss_difference=over_seeds(differences[setting])
                if setting in differences
                else None,
                tokens_to_loss=tokens,
                tokens_ratio=tokens_ratio,
                seconds_to_loss=seconds,
                seconds_ratio=seconds_ratio,
                reached=None if None in targets else sum(place is not None for place in found),
            )
        )
    return rows


def _over_reached(
    found: Sequence[tuple[float, float] | None],
    base: Sequence[tuple[float, float] | None],
    *,
    unit: Literal[0, 1],  # tokens, seconds
) -> tuple[OverSeeds | None, OverSeeds | None]:
    """Return what the seeds needed to reach the loss, and the ratio to the baseline; None if one did not reach it."""
    reached = [place[unit] for place in found if place]
    pairs = zip(found, base, strict=False)  # a baseline may be there before its first step
    ratios = [a[unit] / b[unit] for a, b in pairs if a and b and b[unit]]
    return (
        over_seeds(reached) if len(reached) == len(found) else None,
        over_seeds(ratios) if len(ratios) == len(found) else None,
    )


def last_differences(curves: Mapping[str, Sequence[Curve | None]]) -> dict[str, list[float]]:
    """Return {setting: its last losses minus the baseline's, by seed} of those that end after as many tokens."""
    whole = {name: kept for name, own in curves.items() if (kept := finished(own))}
    base = whole.get(next(iter(curves), ""), [])
    return {
        name: [mine.losses[-1] - one.losses[-1] for mine, one in zip(own, base, strict=False)]
        for name, own in whole.items()
        if base and own[0].tokens[-1] == base[0].tokens[-1]
    }


def write_markdown(
    rows: Sequence[TableRow], *, target: float | None, until_decided: bool = False
) -> str:
    """Format the table; ± is half of the 95 % interval over seeds."""
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
    note = "±: half of the 95 % interval over seeds (Student's t); differences and ratios are paired by seed."
    if until_decided:
        note += " ± ignores that seeds were added until a decision; the confidence sequences account for it."
    if rows[0].reached is None and not rows[0].diverged:
        note += " n/a: losses at its start and end alone do not show when a run reached another; set --eval_freq."
    table = fmt.markdown_table([*header, "ratio", "seconds to it", "ratio"], lines)
    return f"{table}\n\n{note}"


def _diverged(row: TableRow) -> str:
    return f"diverged in {row.diverged} of {fmt.number_of(row.seeds, 'seed')}"


def _show(found: OverSeeds | None, form: str) -> str:
    if found is None:
        return "n/a"
    half = found.half_width
    return form.format(found.mean) + (f" ± {form.format(half).lstrip('+')}" if half else "")


def diverged_sentences(rows: Sequence[TableRow]) -> dict[str, str]:
    """Return {setting that diverged: a sentence on what that means for the comparison}."""
    if not rows:
        return {}
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


def unequal_sentences(rows: Sequence[TableRow]) -> list[str]:
    """Return a sentence for each setting that ends after other tokens than the baseline."""
    return [
        f"{row.setting} ends after {row.tokens:,} tokens and {rows[0].setting} after {rows[0].tokens:,}, so their last "
        f"losses are not compared."
        for row in rows
        if row.tokens and rows[0].tokens and row.tokens != rows[0].tokens
    ]


def write_comparisons(found: Sequence[Comparison], *, smallest: float) -> str:
    """Format what the differences show: a table of both errors, what they mean, and a sentence per setting."""
    head, *rows = comparison_table(found, smallest=smallest)
    sentences = "\n".join(f"- {sentence(one, smallest=smallest)}" for one in found)
    questions = QUESTIONS.format(unit=unit_of(found))
    return "\n\n".join([fmt.markdown_table(head, rows), questions, sentences])


def row_as_json(row: TableRow) -> dict[str, Any]:
    """Return a row as JSON values: of each mean over seeds its value, standard error and half of its interval."""
    return {
        name: {"value": found.mean, "error": found.se, "half_interval": found.half_width}
        if isinstance(found, OverSeeds)
        else found
        for name, found in vars(row).items()
    }


def _spent_line(spent: dict[str, Any], comparisons: Sequence[Comparison]) -> str:
    seeds = fmt.number_of(spent["seeds"], "seed")
    if spent["max_seeds"]:
        seeds = f"{spent['seeds']} of at most {spent['max_seeds']} seeds"
    line = (
        f"Spent: {seeds}, {fmt.number_of(spent['runs'], 'run')}, {spent['tokens']:,} tokens, "
        f"{fmt.duration(spent['step_seconds'])} in training steps."
    )
    sequences = {one.setting: one.sequential for one in comparisons}
    undecided = [name for name, one in sequences.items() if one and one.decision is None]
    if undecided and spent["seeds"] == spent["max_seeds"]:
        line += f" The budget was spent before {', '.join(undecided)} could be decided; a larger --max_seeds continues."
    return line
