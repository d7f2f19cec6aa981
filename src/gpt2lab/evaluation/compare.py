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

# Standard errors of the paired difference; a fair coin goes beyond in about 1 of 20 cases.
NOISE = 2.0
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
    pairs = [tuple(results[kind] for results in found) for kind in both]
    for a, b in pairs:
        if a.units != b.units:
            unit = "items" if a.kind == "hellaswag" else "windows"
            sizes = (
                f"{a.n:,} and {b.n:,} {unit}" if a.n != b.n else f"{a.n:,} {unit} each, but others"
            )
            raise DataError(
                f"{a.kind} was not measured on the same {unit} ({sizes}), so no difference of it means anything; "
                f"evaluate both with the same limit, data and context length"
            )
    return [_difference(m, a, b) for a, b in pairs for m in a.per_unit if m in b.per_unit]


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
    run_dir, only_step = folder, None
    if not is_run(folder) and (folder / manifest.MANIFEST).exists():
        run_dir, only_step = folder.parent, manifest.read_manifest(folder)["step"]
    if is_run(folder) or only_step is not None:
        events, files = history.read_events(run_dir), {}
        for kind, event in _EVENTS.items():
            # On the run's own line of steps; files of other lines may lie beside them.
            steps = {s for s in history.current(events, event) if only_step in (None, s)}
            if steps:
                files[kind] = file_of_step(run_dir, kind, max(steps))
    return {kind: read_results(path) for kind, path in files.items() if path.exists()}


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
        se = [f"{d.se:.4f}", verdict] if d.se is not None else ["n/a", "cannot be told"]
        rows.append([d.metric, *steps, *numbers, se[0], f"{d.n:,}", se[1]])
    header = ("", "step A", "step B", "A", "B", "B - A", "se", "units", "")
    return (
        f"A  {name_a}\nB  {name_b}\n\n{fmt.table(header, rows)}\n\n"
        f"within noise: |B - A| < {NOISE:g} se, the standard error of the mean of the paired differences"
    )
