"""Two groups of runs, each of one setting with several seeds: validation losses with both errors. No torch."""

from __future__ import annotations

import glob
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.target import is_run
from gpt2lab.config.settings import policy_of, to_flat
from gpt2lab.errors import DataError
from gpt2lab.evaluation import over_seeds
from gpt2lab.evaluation.compare import find_results
from gpt2lab.evaluation.over_seeds import Comparison
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.runs import history

Group = dict[int, Path]  # seed -> the run's folder
_METRIC = "val_loss"
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
                f"{word or name}: no run of this name in {paths.for_people(checkpoint_dir)}"
            )
        folders += runs
    group: Group = {}
    first = folders[0]
    wanted, data = _settings_of(first), _data_of(first)
    for folder in dict.fromkeys(folders):
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
class Groups:
    """Two groups that were compared."""

    seeds: tuple[int, ...]
    step_a: int | None  # that was validated last
    step_b: int | None
    found: Comparison  # B's last validation losses against A's


def compare_groups(name_a: str, name_b: str, *, checkpoint_dir: Path) -> Groups:
    """Compare B's last validation losses with A's, with both errors.

    Raises: ConfigError, DataError: other seeds, other documents or steps within a group, losses on other data, or no
        validation.
    """
    a, b = (find_group(name, checkpoint_dir) for name in (name_a, name_b))
    if differ := sorted(set(a) ^ set(b)):
        alone = name_a if differ[0] in a else name_b
        raise DataError(
            f"seed {differ[0]} is in {alone} alone; runs are paired by seed: leave its run out, or train the other"
        )
    of_a, of_b = (_validations(group, checkpoint_dir) for group in (a, b))
    if of_a[0].units != of_b[0].units and _data_of(a[next(iter(a))]) != _data_of(b[next(iter(b))]):
        raise DataError(
            f"{name_a} and {name_b} were validated on other data, so their difference means nothing"
        )
    units = over_seeds.over_units(of_a, of_b, _METRIC)
    pairs = zip(of_a, of_b, strict=True)
    differences = [_mean(one_b) - _mean(one_a) for one_a, one_b in pairs]
    (found,) = over_seeds.compare_all("A", {"B": differences}, {"B": units})
    return Groups(tuple(a), of_a[0].step, of_b[0].step, found)


def _validations(group: Group, checkpoint_dir: Path) -> list[Results]:
    """Return the newest validation of each run, all of one step and over the same documents."""
    kept: list[Results] = []
    for run in group.values():
        found = find_results(str(run), checkpoint_dir).values()
        of_run = next((one for one in found if one.kind == "validation"), None)
        if of_run is None:
            raise DataError(f"{run}: no validation results are kept")
        kept.append(of_run)
        if (of_run.step, of_run.units) != (kept[0].step, kept[0].units):
            first = next(iter(group.values()))
            what = f"after step {kept[0].step} and {of_run.step}"
            if of_run.step == kept[0].step:
                what = f"on other {of_run.unit}s"
            raise DataError(f"{first.name} and {run.name} were last validated {what}")
    return kept


def _mean(results: Results) -> float:
    return estimate_mean(results.per_unit[_METRIC], results.weights).mean


def as_json(name_a: str, name_b: str, groups: Groups) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    values = {"a": name_a, "b": name_b, "metric": _METRIC, "unit": "nats/token", **asdict(groups)}
    found = values.pop("found")
    return values | found | {"sentence": over_seeds.sentence(groups.found)}


def describe(name_a: str, name_b: str, groups: Groups) -> str:
    """Write the comparison as a table, what its errors answer, and a sentence."""
    found = groups.found
    header, *rows = over_seeds.table([found])
    unit = found.over_units.unit if found.over_units else "document"
    names = ((name_a, groups.step_a), (name_b, groups.step_b))
    head = [
        f"{which}  {name}, step {step}" for which, (name, step) in zip("AB", names, strict=True)
    ]
    parts = ["\n".join(head), fmt.table(header, rows)]
    parts += [over_seeds.QUESTIONS.format(unit=unit), over_seeds.sentence(found)]
    return "\n\n".join(parts)
