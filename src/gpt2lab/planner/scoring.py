"""Keeping score: what was foretold of a run, what it came to, and how often the interval held. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.errors import GPT2LabError
from gpt2lab.files import replace_durably
from gpt2lab.planner import calibration, hardware, profiles, report_json
from gpt2lab.planner.estimate import estimate
from gpt2lab.planner.here import Seen, here, look
from gpt2lab.planner.job import Job
from gpt2lab.planner.memory import Dtype
from gpt2lab.runs import history
from gpt2lab.runs.history import read_json, spent_seconds
from gpt2lab.training.start import Start

FILE = "estimate.json"


def forecast(
    job: Job, environment: Mapping[str, Any], *, on_gpu: bool, checkpoint_dir: Path
) -> dict[str, Any]:
    """Return what is foretold of a run that is about to start on this machine, as one JSON object.

    Raises: NoSourceError for a GPU of which nothing is known.
    """
    known = hardware.load()
    machine, ratios = here(
        look() if on_gpu else Seen(()),
        known,
        calibration.read(checkpoint_dir),
        processes=job.world,
        dtype=job.dtype,
        compiled=job.compiled,
        parallel=job.parallel,
        device=environment["device"] if on_gpu else None,
        threads=environment["threads"],
    )
    found = estimate(job, machine, known, ratios=ratios)
    profile = profiles.find(None, known)
    return report_json.as_json(found, profile_name=profile.name, window=None)


def job_of_start(start: Start, *, dtype: Dtype, compiled: bool) -> Job:
    """Return the job that a start of the trainer is."""
    plan = start.plan
    return Job(
        config=start.config,
        max_steps=plan.max_steps,
        world=plan.batch.world_size,
        dtype=dtype,
        compiled=compiled,
        unique_tokens=round(plan.tokens / plan.epochs),
        dataset=(("tokens", float(start.data.tokens("train"))),),
    )


def foretell(start: Start, facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Write what is foretold of a fresh run to its estimate.json, and say it.

    A resumed run keeps what was foretold at its beginning. A forecast that fails never stops a run.
    """
    path, environment = start.run_dir / FILE, facts["environment"]
    if start.checkpoint is not None and path.exists():
        return
    job = job_of_start(start, dtype=environment["dtype"], compiled=environment["compile"] == "on")
    try:
        document = forecast(
            job,
            environment,
            on_gpu=facts["on_gpu"],
            checkpoint_dir=start.run_dir.parent,
        )
        if start.initial is not None:
            document["loss"] = None  # the law is of models that begin with random weights
        replace_durably(path, json.dumps(document, indent=1) + "\n")
    except (OSError, GPT2LabError) as error:
        say(f"forecast       n/a: {error}")
        return
    foretold = document["estimate"]
    value, low, high = (
        fmt.duration(3600 * foretold[key]) for key in ("estimated_hours", "low_hours", "high_hours")
    )
    say(f"forecast       {value} ({low} ... {high}, 80 %), from {document['throughput']['source']}")


def foretold_seconds(run_dir: Path) -> float | None:
    """Return the upper bound of what was foretold of a run, None without a forecast."""
    foretold = (read_json(run_dir / FILE) or {}).get("estimate")
    high = foretold.get("high_hours") if isinstance(foretold, dict) else None
    return 3600 * high if isinstance(high, int | float) else None


def keep_score(start: Start, others: float | None, say: Callable[[str], None]) -> None:
    """Compare a finished run with its forecast, and let the next forecast learn from it; never fails a run.

    `others`: the share of the machine in other hands, unknown where several processes trained.
    """
    if start.plan.batch.world_size > 1:
        others = None
    with contextlib.suppress(OSError, GPT2LabError):
        events = history.read_events(start.run_dir)
        if not events or events[-1]["event"] != "done":
            return
        if start.config.tuning.instructions is None:  # its steps and targets are not pretraining's
            learn(start.run_dir, others=others, source="run")
        actual = complete(start.run_dir)
        if actual is not None:
            inside = "inside" if actual["inside_interval"] else "outside"
            say(
                f"forecast was {actual['time_accuracy']:.0f} % of the actual "
                f"{fmt.duration(3600 * actual['hours'])}, {inside} its 80 % interval"
            )


def complete(run_dir: Path) -> dict[str, Any] | None:
    """Write into a finished run's estimate.json what it came to, and return that; None without a forecast.

    Raises: OSError.
    """
    document = read_json(run_dir / FILE)
    if document is None or not isinstance(document.get("estimate"), dict):
        return None
    events = history.read_events(run_dir)
    seconds = spent_seconds(events)
    predicted = document["estimate"]["estimated_hours"]
    peak = max((e["peak_memory_bytes"] for e in events if e["event"] == "step"), default=None)
    needed = (document.get("memory") or {}).get("total")
    losses = history.current(events, "eval")
    hours = seconds / 3600
    actual = {
        "hours": hours,
        "steps": max(history.current(events, "step"), default=0),
        "starts": history.last_attempt(events),
        "time_accuracy": 100 * predicted / hours,
        "inside_interval": document["estimate"]["low_hours"]
        <= hours
        <= document["estimate"]["high_hours"],
        "peak_memory_bytes": peak,
        "memory_accuracy": 100 * needed / peak if needed and peak else None,
        "val_loss": losses[max(losses)]["val_loss"] if losses else None,
    }
    document["actual"] = actual
    replace_durably(run_dir / FILE, json.dumps(document, indent=1) + "\n")
    return actual


def scores(checkpoint_dir: Path) -> list[dict[str, Any]]:
    """Return one row for each run whose forecast was compared with what it came to."""
    rows = []
    for path in sorted(checkpoint_dir.glob(f"*/{FILE}")):
        document = read_json(path)
        if document is None or not isinstance(document.get("actual"), dict):
            continue
        try:
            actual, foretold = document["actual"], document["estimate"]
            rows.append(
                {
                    "run": path.parent.name,
                    "source": document["throughput"]["source"],
                    "estimated_hours": foretold["estimated_hours"],
                    "low_hours": foretold["low_hours"],
                    "high_hours": foretold["high_hours"],
                    "actual_hours": actual["hours"],
                    "time_accuracy": actual["time_accuracy"],
                    "inside_interval": actual["inside_interval"],
                }
            )
        except (KeyError, TypeError):
            continue
    return rows


def print_history(checkpoint_dir: Path, *, as_json: bool) -> int:
    """Print how earlier forecasts did."""
    rows = scores(checkpoint_dir)
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_source[row["source"]].append(row)
    summary = [
        {
            "source": source,
            "runs": len(of),
            "median_error_percent": 100
            * statistics.median(abs(math.log(r["time_accuracy"] / 100)) for r in of),
            "inside_interval": sum(r["inside_interval"] for r in of) / len(of),
        }
        for source, of in by_source.items()
    ]
    if as_json:
        document = report_json.blank() | {"accuracy": {"summary": summary, "runs": rows}}
        print(json.dumps(document))
        return 0
    if not rows:
        print(
            f"no finished run with a forecast in {checkpoint_dir}; every run writes one when it starts"
        )
        return 0
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
    print(fmt.table(header, cells))
    for row in summary:
        print(
            f"{row['source']}: {row['runs']} runs, median error {row['median_error_percent']:.0f} %, "
            f"{row['inside_interval']:.0%} inside the 80 % interval"
        )
    return 0


def learn(run_dir: Path, *, others: float | None, source: str) -> None:
    """Add a run's line to the calibration file; a run that says too little adds none.

    Raises: OSError.
    """
    facts, settings = read_json(run_dir / "run.json"), read_json(run_dir / "config.json")
    if facts is None or settings is None:
        return
    try:
        record = calibration.record_of(
            history.read_events(run_dir),
            facts["environment"],
            settings,
            others=others,
            source=source,
        )
    except (KeyError, StopIteration, GPT2LabError):
        return
    if record is not None:
        calibration.append(run_dir.parent, record)
