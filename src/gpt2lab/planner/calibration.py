"""What this machine's own runs say about its speed: one line a finished run in `<checkpoint_dir>/calibration.jsonl`.

The file stands beside the runs that it was learned from: visible, movable, deletable with them, one per set of runs.
Every line names its device, so that a folder shared between machines does not mix them. No torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab.config.schema import ModelConfig, Parallel
from gpt2lab.config.settings import ARCHITECTURE, SIZES
from gpt2lab.planner import contention
from gpt2lab.planner.timing import Measured, Rates, fit, work
from gpt2lab.runs import history

FILE = "calibration.jsonl"
MIN_STEPS = 8  # after the first of a start
WINSOR = 8.0  # a step longer than this many medians counts as that
_KEY = ("device", "world", "threads", "dtype", "compile", "parallel")


@dataclass(frozen=True)
class Kind:
    """What must agree for one run's speed to speak for another's."""

    device: str
    world: int
    threads: int | None
    dtype: str
    compile: bool
    parallel: Parallel = "ddp"  # of one process, too


def mean_step(seconds: Sequence[float]) -> float:
    """Return the mean of step times, each clipped at eight medians: sums need means, one stall is not a pace."""
    ceiling = WINSOR * statistics.median(seconds)
    return statistics.fmean(min(value, ceiling) for value in seconds)


def record_of(
    events: list[dict[str, Any]],
    environment: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    others: float | None,
    source: str,
    fewest: int = MIN_STEPS + 2,
) -> dict[str, Any] | None:
    """Return the calibration line of a run's last start, or None if it took too few steps to say anything.

    `environment` as in run.json, `config` as in config.json; `others`: the share of the machine in other hands.
    """
    attempt = history.last_attempt(events)
    mine = [event for event in events if event["attempt"] == attempt]
    steps = [event for event in mine if event["event"] == "step"]
    if len(steps) < fewest:
        return None
    # The first step compiles, the second may still touch fresh memory.
    later = [event["step_seconds"] for event in steps[2:]]
    step = mean_step(later)
    tokens = config["total_batch_size"]
    micro = environment["mini_batch_size"]
    evals = [e for e in mine if e["event"] == "eval" and e["seconds"] > 0]
    scored = [e for e in mine if e["event"] == "hellaswag" and e["seconds"] > 0]
    saves = [e for e in mine if e["event"] == "checkpoint" and e["seconds"] > 0]
    world = environment["world_size"]
    ratios = {"compile": max(0.0, steps[0]["step_seconds"] - step)}
    token = step / (tokens / world)
    if evals:
        ratios["eval"] = statistics.median(
            e["seconds"] / (e["val_tokens"] / world) / token for e in evals
        )
    if scored:
        texts = 2 if config.get("hellaswag_metrics", "all") == "all" else 1
        ratios["hellaswag"] = statistics.median(
            e["seconds"] / (e["n"] / world) / texts / token for e in scored
        )
    if saves:
        ratios["checkpoint"] = statistics.median(e["bytes"] / e["seconds"] for e in saves)
    before = sum(e.get("seconds") or 0.0 for e in mine[: mine.index(steps[0])])
    ratios["start"] = max(0.1, steps[0]["elapsed_seconds"] - steps[0]["step_seconds"] - before)
    cpu = [event.get("cpu_seconds") or 0.0 for event in steps[2:]]
    return {
        "time": steps[-1]["time"],
        "source": source,
        "device": environment["device"],
        "world": world,
        "threads": environment["threads"],
        "dtype": environment["dtype"],
        "compile": environment["compile"] == "on",
        **{name: config[name] for name in ARCHITECTURE if name in config},
        "micro_batch": micro,
        "recompute": config.get("activation_checkpointing", "none"),
        "parallel": config.get("parallel", "ddp") if world > 1 else "ddp",
        "optimizer": config.get("optimizer", "adamw"),
        "accumulation": tokens // config["context_length"] // world // micro,
        "steps": len(later),
        "step_seconds": step,
        "cpu_seconds": mean_step(cpu) if all(cpu) else None,
        "peak_memory": max(event["peak_memory_bytes"] for event in steps),
        "ratios": ratios,
        "others": others,
    }


def append(checkpoint_dir: Path, record: Mapping[str, Any]) -> None:
    """Add one line, whole or not at all.

    Raises: OSError.
    """
    with open(checkpoint_dir / FILE, "ab") as file:
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def read(checkpoint_dir: Path) -> list[dict[str, Any]]:
    """Return the usable lines, oldest first; others (torn, edited) are passed over: they only teach."""
    path = checkpoint_dir / FILE
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
            _measured(record)
        except (ValueError, KeyError, TypeError, RecursionError, ZeroDivisionError):
            continue
        records.append(record)
    return records


def calibrate(
    prior: Rates, records: Sequence[Mapping[str, Any]], kind: Kind, *, spread: float
) -> tuple[Rates, dict[str, float]]:
    """Return rates fitted to this kind of machine's records, and the cost ratios of its events."""
    mine = [
        record
        for record in records
        if all(
            record.get(key, "ddp") == getattr(kind, key)  # parallel is absent in older lines
            for key in _KEY
            if getattr(kind, key) is not None
        )
    ]
    quiet = [record for record in mine if (record.get("others") or 0.0) <= contention.BUSY]
    used = (quiet or mine)[-200:]
    rates = fit(prior, [_measured(record) for record in used], spread=spread)
    ratios: dict[str, float] = {}
    for name in ("eval", "hellaswag", "checkpoint", "compile", "start"):
        values = [r["ratios"][name] for r in used if r.get("ratios", {}).get(name) is not None]
        if values:
            ratios[name] = statistics.median(values)
    return rates, ratios


def _measured(record: Mapping[str, Any]) -> Measured:
    sizes = {name: record[name] for name in SIZES}
    options = {name: record[name] for name in ARCHITECTURE if name in record}  # older lines: none
    model = ModelConfig(**{**options, **sizes})
    amount = work(
        model,
        micro_batch=record["micro_batch"],
        accumulation=record["accumulation"],
        recompute=record.get("recompute", "none"),  # absent: written before there was any
        optimizer=record.get("optimizer", "adamw"),
        updaters=1 if record.get("parallel", "ddp") == "ddp" else record["world"],
    )
    seconds = float(record["step_seconds"])
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError("step_seconds")
    noisy = (record.get("others") or 0.0) > contention.BUSY
    return Measured(amount, seconds, sigma=0.3 if noisy else 0.05)
