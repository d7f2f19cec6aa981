"""Forecasts of runs: written at the start, compared with the actual run at the end, and learned from. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.errors import GPT2LabError
from gpt2lab.files import replace_durably
from gpt2lab.planner import calibration, hardware, reports
from gpt2lab.planner.estimate import estimate
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Watch, detect_hardware
from gpt2lab.runs import history
from gpt2lab.runs.history import Log, read_json
from gpt2lab.training.extension import Extension, LiveRun

FILE = "estimate.json"
_HOURS = ("estimated_hours", "low_hours", "high_hours")


class ForecastExtension(Extension):
    """Writes estimate.json at the start of a run, and compares it with the actual run at the end.

    A resumed run keeps its first forecast. A forecast that fails never stops a run.
    """

    def __init__(self) -> None:
        self._run: LiveRun | None = None

    def started(self, run: LiveRun) -> None:
        """Begin to watch who else uses the machine."""
        self._run, self._watch = run, Watch()

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Write the forecast when the run begins."""
        if event["event"] != "begin" or self._run is None:
            return
        start, facts, say = self._run.start, self._run.components.facts, self._run.logger.say
        path, environment, on_gpu = start.run_dir / FILE, facts["environment"], facts["on_gpu"]
        if start.checkpoint is not None and path.exists():
            return
        plan = start.plan
        job = Job(
            start.config,
            plan.max_steps,
            plan.batch.world_size,
            dtype=environment["dtype"],
            compiled=environment["compile"] == "on",
            unique_tokens=round(plan.tokens / plan.epochs),
            dataset={"tokens": float(start.data.tokens("train"))},
            order=start.order,
        ).with_validation(start.data.tokens("val"))
        if branch := facts["branch_from"]:  # the steps before it are another run's
            job = job.with_steps(max(1, plan.max_steps - branch["step"]))
        try:
            known = hardware.load()
            machine = calibration.this_machine(
                detect_hardware(device="auto" if on_gpu else "cpu"),
                known,
                calibration.read(start.run_dir.parent),
                job,
                device=environment["device"] if on_gpu else None,
                threads=environment["threads"],
            )
            found = estimate(job, machine, known)
            document = reports.estimate_as_json(found, hardware.DEFAULT_PROFILE)
            if start.initial or branch:  # not random weights: the scaling law does not apply
                document["loss"] = None
            replace_durably(path, json.dumps(document, indent=1) + "\n")
        except (OSError, GPT2LabError) as error:
            say(f"forecast       n/a: {error}")
            return
        say(f"forecast       {found.describe_time()}")

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Score the forecast of a complete run, and let the next forecast learn from it; never fails a run."""
        if self._run is None or reason is not None or error is not None:
            return
        start = self._run.start
        ranks, here = start.plan.batch.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        with contextlib.suppress(OSError, GPT2LabError):
            log = history.read_log(start.run_dir)
            # Steps and targets of fine-tuning are not pretraining's.
            if start.config.tuning.instructions is None:
                # What others used is unknown of several machines.
                others = self._watch.others(ranks) if ranks == here else None
                learn(start.run_dir, log, others=others)
            actual = complete(start.run_dir, log)
            if actual is not None and actual["time_accuracy"] is not None:
                self._run.logger.say(f"forecast {reports.describe_actual(actual)}")


def learn(run_dir: Path, log: Log, *, others: float | None) -> None:
    """Add a run's line to the calibration file; a run that is too short adds none.

    `others`: the share of the machine that other programs used; None: unknown.

    Raises: OSError.
    """
    facts, settings = read_json(run_dir / "run.json"), read_json(run_dir / "config.json")
    if facts is None or settings is None:
        return
    try:
        record = calibration.record_of(
            log, facts["environment"], settings, others=others, source="run"
        )
    except (KeyError, StopIteration, GPT2LabError):
        return
    if record is not None:
        calibration.append(run_dir.parent, record)


def complete(run_dir: Path, log: Log) -> dict[str, Any] | None:
    """Write the actual numbers into a finished run's estimate.json, and return them; None without a forecast.

    Raises: OSError.
    """
    document = read_json(run_dir / FILE)
    if document is None or not isinstance(document.get("estimate"), dict):
        return None
    if not len(log.numbers):  # its record is lost
        return None
    predicted = document["estimate"]
    peak = log.peak_memory()
    needed = (document.get("memory") or {}).get("total")
    losses = log.current("eval")
    hours = log.spent_seconds() / 3600
    # A run whose length or batch was changed is not the one that was forecast; no forecast counts CORE. That of a
    # branch, which begins later than at step 0, is of its own steps.
    begins = log.of_kind("begin")
    taken = int(log.numbers[-1]) - (begins[0]["step"] if begins else 0)
    is_same = predicted.get("total_steps") == taken and not log.current("core")
    is_same = is_same and len({begin.get("tokens_per_step") for begin in begins}) < 2
    actual = {
        "hours": hours,
        "steps": int(log.numbers[-1]),
        "starts": log.last_attempt,
        "time_accuracy": 100 * predicted["estimated_hours"] / hours if is_same else None,
        "inside_interval": (
            predicted["low_hours"] <= hours <= predicted["high_hours"] if is_same else None
        ),
        "peak_memory_bytes": peak,
        "memory_accuracy": 100 * needed / peak if needed and peak else None,
        "val_loss": losses[max(losses)]["val_loss"] if losses else None,
    }
    document["actual"] = actual
    replace_durably(run_dir / FILE, json.dumps(document, indent=1) + "\n")
    return actual


def describe_history(checkpoint_dir: Path) -> tuple[dict[str, Any], str]:
    """Return the accuracy of earlier forecasts, a row for each that was compared, as JSON and as text."""
    rows = []
    by_source: dict[str, list[tuple[float, bool]]] = defaultdict(list)  # error, inside the interval
    for path in sorted(checkpoint_dir.glob(f"*/{FILE}")):
        document = read_json(path) or {}
        # Not compared yet, of a run whose length was changed, of another version, or edited.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            actual, predicted = document["actual"], document["estimate"]
            source = str(document["throughput"]["source"])
            row: dict[str, Any] = {"run": path.parent.name, "source": source}
            row |= {key: predicted[key] for key in _HOURS}
            row |= {"actual_hours": actual["hours"], "time_accuracy": actual["time_accuracy"]}
            row |= {"inside_interval": bool(actual["inside_interval"])}
            error = abs(math.log(row["time_accuracy"] / 100))
            by_source[source].append((error, row["inside_interval"]))
            rows.append(row)
    summary = [
        {
            "source": source,
            "runs": len(found),
            "median_error_percent": 100 * statistics.median(error for error, _ in found),
            "inside_interval": statistics.fmean(is_inside for _, is_inside in found),
        }
        for source, found in by_source.items()
    ]
    document = reports.blank_report() | {"accuracy": {"summary": summary, "runs": rows}}
    if not rows:
        none = (
            f"no finished run with a forecast in {checkpoint_dir}; a run writes one when it starts"
        )
        return document, none
    cells = [
        [
            row["run"],
            row["source"],
            fmt.duration(3600 * row["estimated_hours"]),
            f"{fmt.duration(3600 * row['low_hours'])} ... {fmt.duration(3600 * row['high_hours'])}",
            fmt.duration(3600 * row["actual_hours"]),
            f"{row['time_accuracy']:.0f} %",
            "inside" if row["inside_interval"] else "OUTSIDE",
        ]
        for row in rows
    ]
    header = ["run", "source", "predicted", "80 %", "actual", "accuracy", "interval"]
    lines = [
        f"{row['source']}: {row['runs']} runs, median error {row['median_error_percent']:.0f} %, "
        f"{row['inside_interval']:.0%} inside the 80 % interval"
        for row in summary
    ]
    return document, "\n".join([fmt.table(header, cells), *lines])
