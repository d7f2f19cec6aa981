"""Two evaluations of the same units: the paired difference, and whether it is more than noise. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.checkpoint import manifest
from gpt2lab.checkpoint.target import find_folder, is_run
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import (
    KINDS,
    Kind,
    Results,
    file_of_step,
    mean_and_error,
    read_results,
)
from gpt2lab.runs import history

NOISE = (
    2.0  # standard errors of the paired difference; a fair coin goes beyond in about 1 of 20 cases
)
_EVENTS: dict[Kind, str] = {"validation": "eval", "hellaswag": "hellaswag"}


@dataclass(frozen=True)
class Difference:
    """One metric of A and B over the same units."""

    metric: str
    n: int
    step_a: int | None  # None: not of a run
    step_b: int | None
    a: float
    b: float
    difference: float  # b - a, the mean over units
    se: float | None  # of that mean; None for a single unit
    within_noise: bool | None


def compare(
    name_a: str, name_b: str, *, checkpoint_dir: Path, only: Kind | None = None
) -> list[Difference]:
    """Compare what both have: validation losses window by window, HellaSwag item by item.

    Raises: DataError if they have nothing in common or were measured on different units.
    """
    found = [find_results(name, checkpoint_dir) for name in (name_a, name_b)]
    kinds = [kind for kind in KINDS if only in (None, kind)]
    both = [kind for kind in kinds if all(kind in results for results in found)]
    if not both:
        lacks = name_b if set(found[0]) & set(kinds) else name_a
        raise DataError(
            f"{lacks}: no {' or '.join(kinds)} results to compare; measure them with "
            f"python scripts/evaluate.py {lacks} --save DIR (and --val DIR, --hellaswag), then compare DIR"
        )
    a, b = found
    for kind in both:
        _refuse_other_units(kind, a[kind], b[kind])
    return [
        _difference(metric, a[kind], b[kind])
        for kind in both
        for metric in a[kind].per_unit
        if metric in b[kind].per_unit
    ]


def find_results(name: str, checkpoint_dir: Path) -> dict[Kind, Results]:
    """Return the results that a file, a folder of evaluate.py --save, a run (its newest) or a checkpoint holds.

    Raises: DataError naming the file.
    """
    if name.endswith(".npz"):
        results = read_results(Path(name).expanduser())
        return {results.kind: results}
    folder = find_folder(name, checkpoint_dir)
    if folder is None:
        return {}
    files: dict[Kind, Path] = {kind: folder / f"{kind}.npz" for kind in KINDS}
    if is_run(folder):
        files = {
            kind: file_of_step(folder, kind, max(steps))
            for kind in KINDS
            if (steps := _measured(folder, kind))
        }
    elif (folder / manifest.MANIFEST).exists():
        run_dir, step = folder.parent, manifest.read_manifest(folder)["step"]
        files = {
            kind: file_of_step(run_dir, kind, step)
            for kind in KINDS
            if step in _measured(run_dir, kind)
        }
    return {kind: read_results(path) for kind, path in files.items() if path.exists()}


def _measured(run_dir: Path, kind: Kind) -> set[int]:
    """Return the steps on the run's own line at which this was measured; files of other lines may lie beside them."""
    return set(history.current(history.read_events(run_dir), _EVENTS[kind]))


def _refuse_other_units(kind: Kind, a: Results, b: Results) -> None:
    if a.units == b.units:
        return
    unit = "items" if kind == "hellaswag" else "windows"
    sizes = f"{a.n:,} and {b.n:,} {unit}" if a.n != b.n else f"{a.n:,} {unit} each, but others"
    raise DataError(
        f"{kind} was not measured on the same {unit} ({sizes}), so no difference of it means anything; "
        f"evaluate both with the same limit, data and context length"
    )


def _difference(metric: str, a: Results, b: Results) -> Difference:
    of_a, of_b = a.per_unit[metric], b.per_unit[metric]
    mean, se = mean_and_error(of_b - of_a)
    return Difference(
        metric=metric,
        n=a.n,
        step_a=a.step,
        step_b=b.step,
        a=float(of_a.mean()),
        b=float(of_b.mean()),
        difference=mean,
        se=se,
        within_noise=None if se is None else bool(mean == 0 or abs(mean) < NOISE * se),
    )


def as_json(name_a: str, name_b: str, differences: list[Difference]) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    metrics = {difference.metric: asdict(difference) for difference in differences}
    return {"a": name_a, "b": name_b, "noise": NOISE, "metrics": metrics}


def describe(name_a: str, name_b: str, differences: list[Difference]) -> str:
    """Write the comparison as a table, and what its verdicts mean."""
    rows = []
    for d in differences:
        verdict = "within noise" if d.within_noise else "beyond noise"
        steps = ["-" if step is None else f"{step:,}" for step in (d.step_a, d.step_b)]
        numbers = [f"{d.a:.4f}", f"{d.b:.4f}", f"{d.difference:+.4f}"]
        error = ["n/a", f"{d.n}", "cannot be told"]
        if d.se is not None:
            error = [f"{d.se:.4f}", f"{d.n:,}", verdict]
        rows.append([d.metric, *steps, *numbers, *error])
    header = ("", "step A", "step B", "A", "B", "B - A", "se", "units", "")
    return (
        f"A  {name_a}\nB  {name_b}\n\n{fmt.table(header, rows)}\n\n"
        f"within noise: |B - A| < {NOISE:g} se, the standard error of the mean of the paired differences"
    )
