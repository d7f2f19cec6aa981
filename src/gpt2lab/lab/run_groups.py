"""Two groups of runs, each of one setting with several seeds: what both measured, with both errors. No torch."""

from __future__ import annotations

import glob
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.config.settings import policy_of, to_flat
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import Kind, Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.lab import over_seeds
from gpt2lab.lab.compare import find_results, name_of, require_same_units
from gpt2lab.lab.over_seeds import LOSS, SMALLEST, Comparison
from gpt2lab.runs import history
from gpt2lab.runs.target import is_run

Group = dict[int, Path]  # seed -> the run's folder
_OWN = ("seed", "run_name", "checkpoint_dir")  # what the runs of a group may differ in


def is_group(name: str) -> bool:
    """Tell whether a name means several runs: `a_seed1,a_seed2`, or a pattern such as `a_seed*`."""
    return "," in name or glob.has_magic(name)


def find_group(name: str, checkpoint_dir: Path) -> Group:
    """Return the runs that a name means, by their seeds; they may differ in nothing else that training depends on.

    Raises: ConfigError, DataError naming the run.
    """
    folders: list[Path] = []
    for word in (word.strip() for word in name.split(",")):
        places = [checkpoint_dir / word, paths.from_working_directory(Path(word))]
        found = [sorted(map(Path, glob.glob(str(place)))) for place in places]
        runs = next(filter(None, (list(filter(is_run, some)) for some in found)), [])
        if not runs or not word:
            raise DataError(
                f"{word or name}: no run of this name in {paths.display_path(checkpoint_dir)}"
            )
        folders += runs
    group: Group = {}
    first = folders[0]
    wanted, data = _settings_of(first), _data_of(first)
    for folder in dict.fromkeys(folders):
        if history.has_diverged(folder):
            raise DataError(
                f"{name}: {folder.name} diverged, so it has no last results; a group with it is not compared"
            )
        own = _settings_of(folder)
        if other := next((setting for setting in own if own[setting] != wanted[setting]), None):
            raise DataError(
                f"{name}: {other} is {wanted[other]} in {first.name} and {own[other]} in {folder.name}; "
                f"the runs of a group may differ in their seed alone"
            )
        if (other_data := _data_of(folder)) != data:
            raise DataError(
                f"{name}: {first.name} was trained on the data {data} and {folder.name} on {other_data}; "
                f"the runs of a group may differ in their seed alone"
            )
        seed = history.read_config(folder).data.seed
        if seed in group:
            raise DataError(
                f"{name}: {group[seed].name} and {folder.name} both have seed {seed}; leave one out"
            )
        group[seed] = folder
    return dict(sorted(group.items()))


def _settings_of(run: Path) -> dict[str, Any]:
    """Return the settings that the runs of a group share."""
    config = history.read_config(run)
    shared = to_flat(config).items()
    return {n: v for n, v in shared if n not in _OWN and policy_of(n, config) != "free"}


def _data_of(run: Path) -> str:
    """Return what tells a run's data from others; empty where that is not recorded."""
    return str((history.read_json(run / "run.json") or {}).get("data_fingerprint", ""))[:12]


@dataclass(frozen=True)
class Metric:
    """One metric of two groups."""

    step_a: int | None  # that it was measured last after
    step_b: int | None
    found: Comparison  # B against A


@dataclass(frozen=True)
class Groups:
    """Two groups that were compared."""

    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    left_out: tuple[str, ...]  # what some run lacks


def compare_groups(
    name_a: str,
    name_b: str,
    *,
    checkpoint_dir: Path,
    only: Kind | None = None,
    smallest: float = SMALLEST,
) -> Groups:
    """Compare what all runs of both measured last: validation losses, HellaSwag and tasks, with both errors.

    `smallest`: a difference that matters, in the unit of each metric. Metrics are not corrected for each other.

    Raises: ConfigError, DataError: other seeds, other units or steps within a group, other data or items, or nothing
        that all runs have.
    """
    a, b = (find_group(name, checkpoint_dir) for name in (name_a, name_b))
    if differ := sorted(set(a) ^ set(b)):
        alone = name_a if differ[0] in a else name_b
        raise DataError(
            f"seed {differ[0]} is in {alone} alone; runs are paired by seed: leave its run out, or train the other"
        )
    of_runs = {run: find_results(str(run), checkpoint_dir) for run in (*a.values(), *b.values())}
    metrics: list[Metric] = []
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
                f"{name_a} and {name_b} were validated on other data, so their difference means nothing"
            )
        for metric in first_a.per_unit:
            if all(metric in results.per_unit for side in sides for results in side):
                pairs = zip(*sides, strict=True)
                differences = [_mean(of_b, metric) - _mean(of_a, metric) for of_a, of_b in pairs]
                (found,) = over_seeds.compare_all(
                    "A",
                    {"B": differences},
                    {"B": over_seeds.over_units(sides[0], sides[1], metric)},
                    smallest=smallest,
                    metric=name_of(first_a, metric),
                )
                metrics.append(Metric(first_a.step, first_b.step, found))
    if not metrics:
        why = left_out[0] if left_out else f"no run has {only or 'validation'} results"
        raise DataError(f"{name_a} and {name_b} have nothing to compare: {why}")
    return Groups(tuple(a), tuple(metrics), tuple(left_out))


def _require_alike(group: Group, results: list[Results]) -> None:
    """Reject runs of a group that were not measured after one step and on the same units.

    Raises: DataError.
    """
    first = results[0]
    for run, one in zip(group.values(), results, strict=True):
        if (one.step, one.units) != (first.step, first.units):
            what = f"after step {first.step} and {one.step}"
            if one.step == first.step:
                what = f"on other {one.unit}s"
            names = f"{next(iter(group.values())).name} and {run.name}"
            raise DataError(f"{names} were last measured {what} ({name_of(one, one.kind)})")


def _mean(results: Results, metric: str) -> float:
    return estimate_mean(results.per_unit[metric], results.weights).mean


def as_json(name_a: str, name_b: str, groups: Groups, *, smallest: float) -> dict[str, Any]:
    """Return the comparison as JSON values; those of the first metric stand at the top, too."""
    metrics = {}
    for one in groups.metrics:
        values = asdict(one)
        found = values.pop("found")
        unit = "nats/token" if found["metric"] == LOSS else None
        said = over_seeds.sentence(one.found, smallest=smallest)
        metrics[one.found.metric] = values | found | {"unit": unit, "sentence": said}
    head = {"a": name_a, "b": name_b, "seeds": groups.seeds, "smallest_difference": smallest}
    first = next(iter(metrics.values()))
    return head | first | {"metrics": metrics, "left_out": groups.left_out}


def describe(name_a: str, name_b: str, groups: Groups, *, smallest: float) -> str:
    """Write the comparison as a table, what its errors answer, and a sentence a metric."""
    parts = [f"A  {name_a}\nB  {name_b}"]
    units = list(dict.fromkeys(_unit(one) for one in groups.metrics))
    for unit in units:
        shown = [one for one in groups.metrics if _unit(one) == unit]
        header, *rows = over_seeds.table([one.found for one in shown], smallest=smallest)
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


def _unit(one: Metric) -> str:
    return one.found.over_units.unit if one.found.over_units else "document"
