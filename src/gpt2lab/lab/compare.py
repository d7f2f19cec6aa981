"""Whether two evaluations, or two groups of runs over several seeds, differ by more than noise. No torch."""

import functools
import glob
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.config.settings import policy_of, to_flat
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import KINDS, Kind, Results, file_of_step, read_results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.lab import over_seeds
from gpt2lab.lab.over_seeds import LOSS, SMALLEST, Comparison
from gpt2lab.lab.stats import ALPHA, p_of_equal_accuracy, p_of_zero_mean
from gpt2lab.runs import evaluations, history
from gpt2lab.runs.console import say
from gpt2lab.runs.target import find_folder, find_run, is_model, is_run, run_and_step

_EVENTS: dict[Kind, str] = {"validation": "eval", "hellaswag": "hellaswag"}
_NOT_SHARED = ("seed", "run_name", "checkpoint_dir")  # what the runs of a group may differ in
Group = dict[int, Path]  # seed -> the run's folder

# -- two evaluations of the same units -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One metric of A and B over the same units."""

    metric: str
    unit: str
    n: int
    effective_n: float
    step_a: int | None  # None: not from a run
    step_b: int | None
    a: float
    b: float
    difference: float  # b - a, the weighted mean over units
    se: float | None  # of that mean; None for a single unit
    p: float | None  # two-sided, that A and B are equal
    within_noise: bool | None  # p >= ALPHA
    equal: bool  # no unit differs by a bit


def compare(
    name_a: str, name_b: str, *, checkpoint_dir: Path, only: Kind | None = None
) -> list[Difference]:
    """Compare what both have: validation losses by document, HellaSwag and tasks by item.

    Raises: DataError if they have nothing in common or were measured on different units.
    """
    read = functools.cache(read_results)  # a file that both names mean is one object
    of_a, of_b = (find_results(name, checkpoint_dir, read) for name in (name_a, name_b))
    keys = [key for key, results in of_a.items() if only in (None, results.kind)]
    pairs = [(of_a[key], of_b[key]) for key in keys if key in of_b]
    if not pairs:
        lacks = name_b if keys else name_a
        folder = None if lacks.endswith(".npz") else find_folder(lacks, checkpoint_dir)
        if folder is not None and not (is_model(folder) or run_and_step(folder)):
            raise DataError(f"{lacks}: neither results of gpt2lab evaluate --save, nor a model")
        raise DataError(
            f"{lacks}: no {only or 'validation, hellaswag or tasks'} results to compare; measure them with "
            f"gpt2lab evaluate {lacks} --save DIR (and --val DIR, --hellaswag, --tasks), then compare DIR"
        )
    for a, b in pairs:
        require_same_units(a, b)
        if a is b:
            say(f"note: {name_a} and {name_b} mean the same {a.kind} results; name two to compare")
    return [_difference(m, a, b) for a, b in pairs for m in a.per_unit if m in b.per_unit]


def require_same_units(a: Results, b: Results) -> None:
    """Reject two evaluations of the same kind that are not of the same units.

    Raises: DataError.
    """
    if a.units == b.units:
        return
    unit = a.unit
    sizes = f"{a.n:,} {unit}s each, but different ones"
    if a.n != b.n:
        sizes = f"{a.n:,} and {b.n:,} {unit}s"
    raise DataError(
        f"{_task_of(a) or a.kind} was not measured on the same {unit}s ({sizes}), so the difference is "
        f"meaningless; evaluate both with the same limit, data and context length"
    )


def find_results(
    name: str, checkpoint_dir: Path, read: Callable[[Path], Results] = read_results
) -> dict[str, Results]:
    """Return the results that a file, a folder of evaluate.py --save, a run (its newest) or a checkpoint holds.

    Raises: DataError naming the file; ConfigError if there is none of this name.
    """
    if name.endswith(".npz"):
        return _by_what([read(paths.expand_user(name))])
    folder = find_folder(name, checkpoint_dir)
    if folder is None:
        return {}
    files = [*(folder / f"{kind}.npz" for kind in KINDS), *sorted((folder / "tasks").glob("*.npz"))]
    if (of_run := run_and_step(folder)) is not None:
        run_dir, only_step = of_run
        if only_step is None and history.has_diverged(run_dir):
            say(f"note: {name} diverged; its newest results are from before that")
        log, files = history.read_log(run_dir), []
        for kind, event in _EVENTS.items():
            # Only steps that the current log has: files of steps that a resume discarded may lie beside them.
            steps = {s for s in log.current(event) if only_step in (None, s)}
            if steps:
                files.append(file_of_step(run_dir, kind, max(steps)))
        for task, (step, _) in evaluations.newest_tasks(run_dir, log, only_step).items():
            files.append(evaluations.file_of(evaluations.items_folder(run_dir, step), task))
    found = [read(path.resolve()) for path in files if path.exists()]
    if len(targets := sorted({one.target for one in found if one.target is not None})) > 1:
        raise DataError(
            f"{folder}: holds results of {' and of '.join(targets)}; save those of each in a folder of their own"
        )
    return _by_what(found)


def _by_what(found: list[Results]) -> dict[str, Results]:
    return {f"{results.kind} {_task_of(results)}": results for results in found}


def _difference(metric: str, a: Results, b: Results) -> Difference:
    of_a, of_b = a.per_unit[metric], b.per_unit[metric]
    found = estimate_mean(of_b - of_a, a.weights, a.strata)
    p = p_of_zero_mean(of_b - of_a, a.weights, a.strata)
    if a.weights is None and set(np.unique([of_a, of_b])) <= {0.0, 1.0}:  # right or wrong
        p = p_of_equal_accuracy(of_a, of_b)
    return Difference(
        metric=name_of(a, metric),
        unit=a.unit,
        n=a.n,
        effective_n=found.effective_n,
        step_a=a.step,
        step_b=b.step,
        a=estimate_mean(of_a, a.weights).mean,
        b=estimate_mean(of_b, a.weights).mean,
        difference=found.mean,
        se=found.se,
        p=p,
        within_noise=None if p is None else p >= ALPHA,
        equal=bool((of_a == of_b).all()),
    )


def name_of(results: Results, metric: str) -> str:
    """Return the name of a metric, with its task if it has one."""
    return f"{_task_of(results)} {metric}".strip()


def _task_of(results: Results) -> str:
    """Return an lm-eval task with its examples and limit; empty for other results."""
    return str(results.units.get("name", ""))


def describe_differences(name_a: str, name_b: str, differences: list[Difference]) -> str:
    """Format the differences as a table, with what its verdicts mean."""
    rows = []
    for d in differences:
        verdict = "equal" if d.equal else "within noise" if d.within_noise else "beyond noise"
        units = f"{d.n:,} {d.unit}s"
        if round(d.effective_n) != d.n:
            units += f" (effective n {d.effective_n:,.0f})"
        steps = ["-" if step is None else f"{step:,}" for step in (d.step_a, d.step_b)]
        numbers = [f"{d.a:.4f}", f"{d.b:.4f}", f"{d.difference:+.4f}"]
        if d.se is None or d.p is None:
            tests = ["n/a", "n/a", units, "not testable"]
        else:
            tests = [f"{d.se:.4f}", "<0.001" if d.p < 0.0005 else f"{d.p:.3f}", units, verdict]
        rows.append([d.metric, *steps, *numbers, *tests])
    header = ("", "step A", "step B", "A", "B", "B - A", "se", "p", "units", "")
    return (
        f"A  {name_a}\nB  {name_b}\n\n{fmt.table(header, rows)}\n\n"
        f"within noise: p >= {ALPHA:g}; p: how often two equal models would differ by as much. Units are paired; "
        f"accuracies by McNemar's exact test, losses by Student's t or, for few units, a sign-flip test."
    )


# -- two groups of runs ----------------------------------------------------------------------------------------------


def is_group(name: str) -> bool:
    """Return whether a name means several runs: `a_seed1,a_seed2`, or a pattern such as `a_seed*`."""
    return "," in name or glob.has_magic(name)


def find_group(name: str, checkpoint_dir: Path) -> Group:
    """Return the runs that a name means, by seed; all settings that affect training must be equal.

    Raises: ConfigError, DataError naming the run.
    """
    folders: list[Path] = []
    for word in map(str.strip, name.split(",")):
        if not glob.has_magic(word):
            folders.append(find_run(word, checkpoint_dir))
            continue
        places = [checkpoint_dir / word, paths.from_working_directory(Path(word))]
        found = [sorted(map(Path, glob.glob(str(place)))) for place in places]
        runs = next(filter(None, (list(filter(is_run, some)) for some in found)), [])
        if not runs:
            raise DataError(f"{word}: no run of this name in {paths.display_path(checkpoint_dir)}")
        folders += runs
    group: Group = {}
    first = folders[0]
    wanted, data = _settings_of(first), _data_of(first)
    for folder in dict.fromkeys(folders):
        if history.has_diverged(folder):
            raise DataError(
                f"{name}: {folder.name} diverged, so it has no final results; a group with it is not compared"
            )
        own = _settings_of(folder)
        if other := next((setting for setting in own if own[setting] != wanted[setting]), None):
            raise DataError(
                f"{name}: {other} is {wanted[other]} in {first.name} and {own[other]} in {folder.name}; "
                f"runs of a group may differ only in their seed"
            )
        if (other_data := _data_of(folder)) != data:
            raise DataError(
                f"{name}: {first.name} was trained on data {data} and {folder.name} on {other_data}; "
                f"runs of a group may differ only in their seed"
            )
        seed = history.read_config(folder).data.seed
        if seed in group:
            raise DataError(
                f"{name}: {group[seed].name} and {folder.name} both have seed {seed}; leave one out"
            )
        group[seed] = folder
    return dict(sorted(group.items()))


def _settings_of(run: Path) -> dict[str, Any]:
    config = history.read_config(run)
    shared = to_flat(config).items()
    return {n: v for n, v in shared if n not in _NOT_SHARED and policy_of(n, config) != "free"}


def _data_of(run: Path) -> str:
    """Return the beginning of the data fingerprint of a run; empty if none is recorded."""
    return str((history.read_json(run / "run.json") or {}).get("data_fingerprint", ""))[:12]


@dataclass(frozen=True)
class GroupMetric:
    """One metric of two groups."""

    step_a: int | None  # of the last measurement
    step_b: int | None
    found: Comparison  # B against A


@dataclass(frozen=True)
class ComparedGroups:
    """Two groups that were compared."""

    a: str
    b: str
    smallest: float  # a difference that matters, in the unit of each metric
    seeds: tuple[int, ...]
    metrics: tuple[GroupMetric, ...]
    left_out: tuple[str, ...]  # results that some run lacks


def compare_groups(
    name_a: str,
    name_b: str,
    *,
    checkpoint_dir: Path,
    only: Kind | None = None,
    smallest: float = SMALLEST,
) -> ComparedGroups:
    """Compare the last results that all runs of both groups have, with the errors over seeds and over units.

    `smallest`: a difference that matters, in the unit of each metric. There is no correction for several metrics.

    Raises: ConfigError, DataError: different seeds, different units or steps within a group, different data or items,
        or nothing that all runs have.
    """
    a, b = (find_group(name, checkpoint_dir) for name in (name_a, name_b))
    if a == b:
        say(f"note: {name_a} and {name_b} mean the same runs; name two groups to compare")
    if differ := sorted(set(a) ^ set(b)):
        alone = name_a if differ[0] in a else name_b
        raise DataError(
            f"seed {differ[0]} is only in {alone}; runs are paired by seed: leave its run out, or train the other"
        )
    of_runs = {run: find_results(str(run), checkpoint_dir) for run in (*a.values(), *b.values())}
    metrics: list[GroupMetric] = []
    left_out = []
    for key in dict.fromkeys(key for found in of_runs.values() for key in found):
        if only not in (None, kind := key.partition(" ")[0]):
            continue
        if lacks := next((run for run, found in of_runs.items() if key not in found), None):
            left_out.append(f"{lacks.name} has no {key.strip()} results")
            continue
        sides = [[of_runs[run][key] for run in group.values()] for group in (a, b)]
        for group, results in zip((a, b), sides, strict=True):
            _require_alike(group, results)
        first_a, first_b = sides[0][0], sides[1][0]
        if kind != "validation":
            require_same_units(first_a, first_b)
        elif first_a.units != first_b.units and len(set(map(_data_of, of_runs))) > 1:
            raise DataError(
                f"{name_a} and {name_b} were validated on different data, so the difference is meaningless"
            )
        metrics += _compare_results(*sides, smallest=smallest)
    if not metrics:
        why = left_out[0] if left_out else f"no run has {only or 'validation'} results"
        raise DataError(f"{name_a} and {name_b} have nothing to compare: {why}")
    return ComparedGroups(name_a, name_b, smallest, tuple(a), tuple(metrics), tuple(left_out))


def _compare_results(
    a: list[Results], b: list[Results], *, smallest: float
) -> Iterator[GroupMetric]:
    for metric in a[0].per_unit:
        if all(metric in results.per_unit for results in (*a, *b)):
            pairs = zip(a, b, strict=True)
            differences = [_mean(of_b, metric) - _mean(of_a, metric) for of_a, of_b in pairs]
            whole = all(set(r.per_unit[metric]) <= {0.0, 1.0} for r in (*a, *b))  # right or wrong
            (found,) = over_seeds.compare_all(
                "A",
                {"B": differences},
                {"B": over_seeds.over_units(a, b, metric)},
                smallest=smallest,
                metric=name_of(a[0], metric),
                step=1 / a[0].n if whole else 0.0,
            )
            yield GroupMetric(a[0].step, b[0].step, found)


def _require_alike(group: Group, results: list[Results]) -> None:
    """Reject runs of a group that were not measured at the same step and on the same units."""
    first = results[0]
    for run, one in zip(group.values(), results, strict=True):
        if (one.step, one.units) != (first.step, first.units):
            what = f"after step {first.step} and {one.step}"
            if one.step == first.step:
                what = f"on different {one.unit}s"
            names = f"{next(iter(group.values())).name} and {run.name}"
            raise DataError(f"{names} were last measured {what} ({name_of(one, one.kind)})")


def _mean(results: Results, metric: str) -> float:
    return estimate_mean(results.per_unit[metric], results.weights).mean


def groups_as_json(groups: ComparedGroups) -> dict[str, Any]:
    """Return the comparison as JSON values; those of the first metric also at the top level."""
    metrics = {}
    for one in groups.metrics:
        values = asdict(one)
        found = values.pop("found")
        unit = "nats/token" if found["metric"] == LOSS else None
        said = over_seeds.sentence(one.found, smallest=groups.smallest)
        metrics[one.found.metric] = values | found | {"unit": unit, "sentence": said}
    head: dict[str, Any] = {"a": groups.a, "b": groups.b, "seeds": groups.seeds}
    head |= {"smallest_difference": groups.smallest}
    first = next(iter(metrics.values()))
    return head | first | {"metrics": metrics, "left_out": groups.left_out}


def describe_groups(groups: ComparedGroups) -> str:
    """Format the comparison as tables, with what the errors mean and one sentence per metric."""
    smallest, parts = groups.smallest, [f"A  {groups.a}\nB  {groups.b}"]
    units = list(dict.fromkeys(over_seeds.unit_of([one.found]) for one in groups.metrics))
    for unit in units:
        shown = [one for one in groups.metrics if over_seeds.unit_of([one.found]) == unit]
        header, *rows = over_seeds.comparison_table([one.found for one in shown], smallest=smallest)
        names = {"setting": "", "difference, nats": "B - A", "p (Holm)": "p"}
        header = [names.get(name, name) for name in header]
        for one, row in zip(shown, rows, strict=True):
            steps = ["-" if step is None else f"{step:,}" for step in (one.step_a, one.step_b)]
            row[:1] = [one.found.metric, *steps]
        parts.append(fmt.table([header[0], "step A", "step B", *header[1:]], rows))
    parts += [f"not compared: {why}" for why in groups.left_out]
    parts.append(over_seeds.QUESTIONS.format(unit="s or ".join(units)))
    parts += [over_seeds.sentence(one.found, smallest=smallest) for one in groups.metrics]
    return "\n\n".join(parts)
