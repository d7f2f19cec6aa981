"""Two evaluations of the same units: the paired difference, and whether it is more than noise. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import fmt
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import KINDS, Kind, Results, file_of_step, read_results
from gpt2lab.evaluation.uncertainty import estimate_mean, p_of_equal_accuracy, p_of_zero_mean
from gpt2lab.runs import evaluations, history
from gpt2lab.runs.target import find_folder, run_and_step

NOISE = 0.05  # a difference whose p-value is below is beyond noise: by chance alone 1 of 20 is
_EVENTS: dict[Kind, str] = {"validation": "eval", "hellaswag": "hellaswag"}


@dataclass(frozen=True)
class Difference:
    """One metric of A and B over the same units."""

    metric: str
    unit: str
    n: int
    effective_n: float
    step_a: int | None  # None: not of a run
    step_b: int | None
    a: float
    b: float
    difference: float  # b - a, the weighted mean over units
    se: float | None  # of that mean; None for a single unit
    p: float | None  # two-sided, that A and B are equal
    within_noise: bool | None


def compare(
    name_a: str, name_b: str, *, checkpoint_dir: Path, only: Kind | None = None
) -> list[Difference]:
    """Compare what both have: validation losses document by document, HellaSwag and tasks item by item.

    Raises: DataError if they have nothing in common or were measured on different units.
    """
    found = [
        {
            key: results
            for key, results in find_results(name, checkpoint_dir).items()
            if only in (None, results.kind)
        }
        for name in (name_a, name_b)
    ]
    pairs = [(results, found[1][key]) for key, results in found[0].items() if key in found[1]]
    if not pairs:
        lacks = name_b if found[0] else name_a
        what = f"no {only or 'validation, hellaswag or tasks'} results to compare; measure them"
        if not lacks.endswith(".npz") and find_folder(lacks, checkpoint_dir) is None:
            what = (
                "no run, folder or .npz file of this name; if it is a model of the Hub, measure it"
            )
        raise DataError(
            f"{lacks}: {what} with "
            f"gpt2lab evaluate {lacks} --save DIR (and --val DIR, --hellaswag, --tasks), then compare DIR"
        )
    for a, b in pairs:
        require_same_units(a, b)
    return [_difference(m, a, b) for a, b in pairs for m in a.per_unit if m in b.per_unit]


def require_same_units(a: Results, b: Results) -> None:
    """Reject two evaluations of the same kind that are not of the same units.

    Raises: DataError.
    """
    if a.units == b.units:
        return
    unit = a.unit
    sizes = f"{a.n:,} {unit}s each, but others"
    if a.n != b.n:
        sizes = f"{a.n:,} and {b.n:,} {unit}s"
    raise DataError(
        f"{_task_of(a) or a.kind} was not measured on the same {unit}s ({sizes}), so their difference means "
        f"nothing; evaluate both with the same limit, data and context length"
    )


def find_results(name: str, checkpoint_dir: Path) -> dict[str, Results]:
    """Return the results that a file, a folder of evaluate.py --save, a run (its newest) or a checkpoint holds.

    Raises: DataError naming the file.
    """
    if name.endswith(".npz"):
        return _by_what([read_results(Path(name).expanduser())])
    folder = find_folder(name, checkpoint_dir)
    if folder is None:
        return {}
    files = [*(folder / f"{kind}.npz" for kind in KINDS), *sorted((folder / "tasks").glob("*.npz"))]
    if (of_run := run_and_step(folder)) is not None:
        run_dir, only_step = of_run
        log, files = history.read_log(run_dir), []
        for kind, event in _EVENTS.items():
            # On the run's own line of steps; files of other lines may lie beside them.
            steps = {s for s in log.current(event) if only_step in (None, s)}
            if steps:
                files.append(file_of_step(run_dir, kind, max(steps)))
        for task, (step, _) in evaluations.newest_tasks(run_dir, log, only_step).items():
            files.append(evaluations.file_of(evaluations.items_folder(run_dir, step), task))
    return _by_what([read_results(path) for path in files if path.exists()])


def _by_what(found: list[Results]) -> dict[str, Results]:
    """Return results by what they measure: two evaluations have the same in common."""
    return {f"{results.kind} {_task_of(results)}": results for results in found}


def _difference(metric: str, a: Results, b: Results) -> Difference:
    of_a, of_b = a.per_unit[metric], b.per_unit[metric]
    found = estimate_mean(of_b - of_a, a.weights, a.strata)
    right_or_wrong = set(np.unique([of_a, of_b])) <= {0.0, 1.0}
    p = (
        p_of_equal_accuracy(of_a, of_b)
        if right_or_wrong
        else p_of_zero_mean(of_b - of_a, a.weights, a.strata)
    )
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
        within_noise=None if p is None else p >= NOISE,
    )


def name_of(results: Results, metric: str) -> str:
    """Name a metric with its task, where it is of one."""
    return f"{_task_of(results)} {metric}".strip()


def _task_of(results: Results) -> str:
    """Name a task of lm-eval, its examples and its limit; empty for what is none."""
    return str(results.units.get("name", ""))


def as_json(name_a: str, name_b: str, differences: list[Difference]) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    metrics = {difference.metric: asdict(difference) for difference in differences}
    return {"a": name_a, "b": name_b, "noise": NOISE, "metrics": metrics}


def describe(name_a: str, name_b: str, differences: list[Difference]) -> str:
    """Write the comparison as a table, and what its verdicts mean."""
    rows = []
    for d in differences:
        verdict = "within noise" if d.within_noise else "beyond noise"
        units = f"{d.n:,} {d.unit}s"
        if round(d.effective_n) != d.n:
            units += f" (effective n {d.effective_n:,.0f})"
        steps = ["-" if step is None else f"{step:,}" for step in (d.step_a, d.step_b)]
        numbers = [f"{d.a:.4f}", f"{d.b:.4f}", f"{d.difference:+.4f}"]
        if d.se is None or d.p is None:
            tests = ["n/a", "n/a", units, "cannot be told"]
        else:
            tests = [f"{d.se:.4f}", f"{d.p:.3f}", units, verdict]
        rows.append([d.metric, *steps, *numbers, *tests])
    header = ("", "step A", "step B", "A", "B", "B - A", "se", "p", "units", "")
    return (
        f"A  {name_a}\nB  {name_b}\n\n{fmt.table(header, rows)}\n\n"
        f"within noise: p >= {NOISE:g}, p: how often two equal models would differ by as much. "
        f"Units are paired; accuracies by McNemar's exact test, losses by Student's t or, of few units, by all signs."
    )
