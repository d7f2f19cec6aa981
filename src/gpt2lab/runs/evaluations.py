"""Results of `gpt2lab evaluate --tasks` in the run's folder: evaluations/step_00000250.json, and .npz files of items.

The file of a step holds {step, attempt, tasks: {name: {task, n, num_fewshot, metrics: {name: {value, se}}}}}. No torch.
"""

import fcntl
import json
import re
from pathlib import Path
from typing import Any

from gpt2lab import files
from gpt2lab.files import COUNT, NUMBER, object_of, object_with, or_null, replace_durably
from gpt2lab.runs.history import Log, read_json, warn_once

FOLDER = "evaluations"
Tasks = dict[str, dict[str, Any]]
_NUMBER = or_null(NUMBER)
_METRIC = object_with({"value": _NUMBER, "se": _NUMBER}, "")
_TASK = object_with({"n": or_null(COUNT), "metrics": object_of(_METRIC, "")}, "")
_CONTENT = {"step": COUNT, "attempt": or_null(COUNT), "tasks": object_of(_TASK, "tasks' numbers")}


def file_of(folder: Path, name: str) -> Path:
    """Return the path of the file with the items of a task."""
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.npz"


def items_folder(run_dir: Path, step: int) -> Path:
    """Return the path of the folder with the items that the weights of `step` were evaluated on."""
    return run_dir / FOLDER / f"step_{step:08d}"


def add_tasks(run_dir: Path, log: Log, step: int, tasks: Tasks) -> None:
    """Add results at `step` to those of the run; a task that is there is replaced. A damaged file is put aside.

    Raises: OSError.
    """
    attempt, path = attempt_of(log, step), items_folder(run_dir, step).with_suffix(".json")
    path.parent.mkdir(exist_ok=True)
    with open(path.parent / ".lock", "a", opener=files.regular) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another `evaluate` of this step may end now
        known = read_json(path, _CONTENT)
        if known is None and path.exists():
            aside = path.replace(path.with_suffix(".damaged"))
            warn_once(f"its results are kept in {aside}")
        before = known["tasks"] if known and known["attempt"] == attempt else {}
        content = {"step": step, "attempt": attempt, "tasks": before | tasks}
        replace_durably(path, json.dumps(content, indent=2) + "\n")


def newest_tasks(
    run_dir: Path, log: Log, only_step: int | None = None
) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return {name: (step, numbers)}: the newest evaluation of each task, or the one at `only_step`.

    Evaluations of steps that did not lead to the newest weights are left out.
    """
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for path in sorted((run_dir / FOLDER).glob("step_*.json")):
        content = read_json(path, _CONTENT)
        if content is None:
            continue
        step = content["step"]
        # A later start from an earlier step may have trained this step again.
        if only_step in (None, step) and content["attempt"] == attempt_of(log, step):
            found |= {name: (step, numbers) for name, numbers in content["tasks"].items()}
    return dict(sorted(found.items()))


def current_folders(
    run_dir: Path, log: Log, facts: str, only_step: int | None = None
) -> list[Path]:
    """Return the folders of steps whose file `facts` was measured on the run's current weights, newest step first.

    `attempt` in the file is the start that measured: the one that trained the step, or a later one. A file that cannot
    be read is returned too, so that its reader reports it.
    """
    folders = []
    for path in sorted((run_dir / FOLDER).glob(f"step_*/{facts}"), reverse=True):
        digits = path.parent.name.removeprefix("step_")
        step = int(digits) if digits.isdecimal() else None
        if step is None or only_step not in (None, step):
            continue
        found, taken = read_json(path), attempt_of(log, step)
        measured = None if found is None else found.get("attempt")
        is_later = isinstance(measured, int) and taken is not None and measured >= taken
        if found is None or is_later or measured is taken is None:
            folders.append(path.parent)
    return folders


def attempt_of(log: Log, step: int) -> int | None:
    """Return the number of the start that trained a current step, None if no start did."""
    attempts = log.column("attempt")[log.numbers == step]
    return int(attempts[0]) if len(attempts) else None
