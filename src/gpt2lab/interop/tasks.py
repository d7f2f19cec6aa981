"""Tasks of EleutherAI's lm-evaluation-harness on a model of ours: their numbers, and their items to compare."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2lab import fmt
from gpt2lab.config.flags import option
from gpt2lab.errors import ConfigError, DataError, GPT2LabError, first_line
from gpt2lab.evaluation.results import Results, write_results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.runs import history
from gpt2lab.runs.console import doing
from gpt2lab.runs.evaluations import add_tasks, file_of, items_folder
from gpt2lab.runs.events import finite
from gpt2lab.runs.target import is_run

if TYPE_CHECKING:
    from gpt2lab.evaluation.request import Subject

# Resamples for the standard error of metrics that are not means, such as a perplexity. They give the error to 2 %;
# lm-eval's default of 100,000 takes minutes.
_BOOTSTRAPS = 1000


@dataclass(frozen=True)
class TaskRequest:
    """Which tasks of lm-eval and CORE to measure, and how."""

    tasks: str | None = option(
        None, "tasks of EleutherAI's lm-eval, separated by commas, such as arc_easy,piqa"
    )
    limit: int | None = option(None, "of each task only the first N items", least=1)
    num_fewshot: int | None = option(
        None, "examples before each item of a task; default: the task's own", least=0
    )
    tasks_path: Path | None = option(None, "folder with more tasks, as YAML files of lm-eval")
    apply_chat_template: bool = option(
        False, "put the tasks' prompts into the chat template of a fine-tuned run"
    )
    core: Path | None = option(
        None, "score CORE: the folder or zip of DCLM's evaluation bundle (eval_bundle.zip)"
    )
    core_limit: int | None = option(None, "of each task of CORE only N items", least=1)

    @property
    def wanted(self) -> list[str]:
        """The single names."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


@dataclass(frozen=True)
class TaskResults:
    """Tasks and groups of tasks: their numbers as JSON values, and the results of tasks item by item."""

    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    items: dict[str, Results] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def require_tasks(request: TaskRequest) -> None:
    """Reject what lm-eval cannot measure, as far as its files tell: to import it takes many seconds.

    Raises: ConfigError if it is not installed, there are no tasks in the folder, or no file has a name of the request.
    """
    spec, wanted = importlib.util.find_spec("lm_eval"), request.wanted
    tasks_path = request.tasks_path
    if spec is None:
        raise ConfigError(
            "--tasks needs EleutherAI's lm-eval, which is not installed: pip install 'gpt2lab[lm-eval]'"
        )
    if tasks_path is not None and not any(tasks_path.rglob("*.yaml")):
        raise ConfigError(
            f"--tasks_path {tasks_path}: no such folder, or no task in it (a .yaml file)"
        )
    if not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError("--tasks: give names separated by commas, each once")
    missing, known = set(wanted), set[str]()
    places = [place for place in (tasks_path, *(spec.submodule_search_locations or ())) if place]
    for folder, _, names in itertools.chain.from_iterable(map(os.walk, places)):
        for name in names if missing else ():
            if name.endswith(".yaml"):
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    text = file.read()
                known.update(re.findall(r"^(?:task|group): *(\S+)", text, re.M))
                pattern = {one: rf"(?<![\w-]){re.escape(one)}(?![\w-])" for one in missing}
                missing -= {one for one in missing if one in text and re.search(pattern[one], text)}
    if missing:
        hint = fmt.did_you_mean(name := min(missing), known)
        raise ConfigError(
            f"--tasks {name}: lm-eval has no such task; {f'{hint} ' if hint else ''}`lm_eval ls tasks` lists "
            f"its tasks, --tasks_path adds a folder of your own"
        )


def measure_tasks(request: TaskRequest, subject: Subject) -> TaskResults:
    """Return what the tasks of lm-eval measure; nothing on other ranks than 0.

    Raises: ConfigError, DataError in one line.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # no forks of a process with threads and a GPU
    # The library prints messages to stdout.
    with doing(f"tasks {request.tasks}"), contextlib.redirect_stdout(sys.stderr):
        from lm_eval import simple_evaluate

        from gpt2lab.interop.lm_eval import GPT2LabLM

        runtime = subject.runtime
        answerer = GPT2LabLM(subject)
        if request.apply_chat_template:
            answerer.chat_template(True)  # fails before any data is read
        wanted = request.wanted
        manager = _in_one_line(lambda: _manager(wanted, request.tasks_path))
        load = manager.load
        manager.load = lambda names: runtime.on_all_ranks(lambda: _in_one_line(lambda: load(names)))
        found = _in_one_line(
            lambda: simple_evaluate(
                model=answerer,
                tasks=wanted,
                task_manager=manager,
                limit=request.limit,
                num_fewshot=request.num_fewshot,
                apply_chat_template=request.apply_chat_template,
                bootstrap_iters=0 if runtime.rank else _BOOTSTRAPS,
            )
        )
    return TaskResults() if subject.runtime.rank else _read(found)


def keep_tasks(measured: TaskResults, run_dir: Path, step: int) -> str | None:
    """Write what was measured of a step into its run; return the problem, as the numbers are shown anyway."""
    if not is_run(run_dir):  # of a checkpoint that was copied
        return None
    folder = items_folder(run_dir, step)
    try:
        for name, results in measured.items.items():
            write_results(file_of(folder, name), replace(results, step=step))
        add_tasks(run_dir, history.read_log(run_dir), step, measured.numbers)
    except OSError as error:
        return f"{folder}: not written ({error.strerror})"
    return None


def _manager(wanted: list[str], tasks_path: Path | None) -> Any:
    """Return lm-eval's index of tasks, that of the folder alone if it has all that are wanted."""
    from lm_eval.tasks import TaskManager

    if tasks_path is not None:  # to parse lm-eval's own 14,000 files takes seconds
        manager = TaskManager(include_path=str(tasks_path), include_defaults=False)
        if set(wanted) <= set(manager.all_subtasks):
            return manager
    return TaskManager(include_path=tasks_path and str(tasks_path))


def _in_one_line(act: Callable[[], Any]) -> Any:
    """Return what `act` returns; any exception of lm-eval or datasets becomes a DataError."""
    try:
        return act()
    except (GPT2LabError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise DataError(f"lm-eval: {type(error).__name__}: {first_line(error)}") from error


def _read(found: dict[str, Any]) -> TaskResults:
    numbers: dict[str, dict[str, Any]] = {}
    items: dict[str, Results] = {}
    sizes, shots = found["n-samples"], found["n-shot"]
    for task, values in found["results"].items():
        size, shot = sizes.get(task), shots.get(task)
        n = size["effective"] if size else None
        name = task + (f"-{shot}shot" if shot else "")
        if cut := _cut(found, task):
            name += f"-first{cut}"
        metrics = _metrics(values)
        if not metrics:  # a heading of other tasks
            continue
        numbers[name] = {"task": task, "n": n, "num_fewshot": shot, "metrics": metrics}
        samples = found["samples"].get(task)
        if samples and (results := _items(name, samples, metrics)) is not None:
            items[name] = results
    return TaskResults(numbers, items)


def _cut(found: dict[str, Any], task: str) -> int:
    """Return how many first items were asked of a task, or of those of a group, with more items; 0 if all were."""
    if size := found["n-samples"].get(task):
        return int(size["effective"]) if size["effective"] < size["original"] else 0
    parts = found.get("group_subtasks", {}).get(task, ())
    return max((_cut(found, part) for part in parts), default=0)


def _metrics(values: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return {metric: value and standard error} of lm-eval's `acc,none` and `acc_stderr,none`; None if not finite."""
    metrics = {}
    for key, value in values.items():
        metric, comma, filter = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error: Any = values.get(f"{metric}_stderr,{filter}")
        error = float(error) if isinstance(error, int | float) else None
        metrics[_metric_name(metric, filter)] = finite({"value": float(value), "se": error})
    return metrics


def _metric_name(metric: str, filter: str) -> str:
    return metric if filter == "none" else f"{metric},{filter}"


def _items(name: str, samples: list[dict[str, Any]], metrics: dict[str, Any]) -> Results | None:
    """Return the items of a task, for metrics that are means over them; None if none is."""
    digest = hashlib.sha256()
    per_unit: dict[str, dict[int, Any]] = {}
    for sample in sorted(samples, key=lambda sample: int(sample["doc_id"])):
        hashes = (sample[f"{part}_hash"] for part in ("doc", "prompt", "target"))
        digest.update(f"{' '.join(hashes)}\n".encode())
        for metric in sample["metrics"]:
            key = _metric_name(metric, sample["filter"])
            per_unit.setdefault(key, {})[sample["doc_id"]] = sample[metric]
    kept: dict[str, np.ndarray] = {}
    weights = None
    for metric, by_item in per_unit.items():
        if metric not in metrics or metrics[metric]["value"] is None:
            continue
        try:
            values = np.array(list(by_item.values()), dtype=np.float64)
        except (TypeError, ValueError):  # a metric that takes all answers at once
            continue
        own = None
        if metric == "bits_per_byte" and values.ndim == 2:  # log-probability and bytes of each text
            own = values[:, 1]
            values = -values[:, 0] / own / math.log(2)
        if values.ndim != 1 or (own is not None and kept):
            continue
        # Only a mean over items can be compared item by item.
        mean = estimate_mean(values, own)
        if math.isclose(mean.mean, metrics[metric]["value"], rel_tol=1e-9):
            kept[metric], weights = values, own
            if metrics[metric]["se"] is None:  # lm-eval has none for bits per byte
                metrics[metric]["se"] = mean.se
    if not kept:
        return None
    units = {"name": name, "items": digest.hexdigest()}
    return Results("tasks", units, kept, {}, weights=weights)
