"""How long a run still takes, read from its own metrics; what a model costs where nothing ran yet. No torch."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, history, paths
from gpt2lab.config import Config
from gpt2lab.errors import ConfigError
from gpt2lab.plan import checkpoint_bytes, count_parameters, flops_per_token
from gpt2lab.progress import Progress, frequencies

SCHEMA = "gpt2-estimate/1"


@dataclass(frozen=True)
class Remaining:
    """What is known of a run that has begun."""

    run_dir: Path
    step: int
    last_step: int
    tokens_per_second: float | None
    seconds: float | None  # left; None before there is a pace
    low_seconds: float | None  # if every step were like the fastest tenth of the recent ones
    high_seconds: float | None  # ... like the slowest tenth
    trained_seconds: float  # in steps, over all starts


def last_written_run(checkpoint_dir: Path) -> Path | None:
    """Return the run that wrote to its metrics last, or None."""
    files = checkpoint_dir.glob(f"*/{history.METRICS}")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


def estimate_remaining(run_dir: Path) -> Remaining:
    """Project the rest of a run from the pace of its last start and the cost of its events.

    Raises: ConfigError if the folder is not a run that has begun.
    """
    config, events = history.read_config(run_dir), history.read_events(run_dir)
    steps = history.current(events, "step")
    begun = [event for event in events if event["event"] == "begin"]
    if not begun:
        raise ConfigError(f"{run_dir}: has not begun to train; nothing to go by yet")
    last_step = begun[-1]["max_steps"]
    progress = Progress(last_step=last_step, frequencies=frequencies(config))
    attempt = history.last_attempt(events)  # another start may have run on another machine
    recent: list[float] = []
    for event in events:
        if event["attempt"] != attempt:
            continue
        if event["event"] == "step":
            progress.record_step(event["step_seconds"])
            recent.append(event["step_seconds"])
        elif "seconds" in event and event["event"] != "done":
            progress.record_event(event["event"], event["seconds"])
    step = max(steps, default=0)
    seconds, pace = progress.remaining(step), progress.step_seconds()
    low = high = None
    if seconds is not None and pace is not None and len(recent) >= 12:
        deciles = statistics.quantiles(recent[-100:], n=10)
        low = max(0.0, seconds + (deciles[0] - pace) * (last_step - step))
        high = seconds + (deciles[-1] - pace) * (last_step - step)
    return Remaining(
        run_dir=run_dir,
        step=step,
        last_step=last_step,
        tokens_per_second=config.batch.total_batch_size / pace if pace else None,
        seconds=seconds,
        low_seconds=low,
        high_seconds=high,
        trained_seconds=sum(event["step_seconds"] for event in steps.values()),
    )


def describe(remaining: Remaining) -> str:
    """Write the projection for people."""
    left = fmt.duration(remaining.seconds)
    if remaining.step >= remaining.last_step:
        left = "nothing: the run is complete"
    elif remaining.low_seconds is not None:
        left += f" (between {fmt.duration(remaining.low_seconds)} and {fmt.duration(remaining.high_seconds)} "
        left += "if all steps were like the fastest or slowest tenth of the recent ones)"
    rate = remaining.tokens_per_second
    rows = [
        ("run", paths.for_people(remaining.run_dir)),
        (
            "done",
            f"{remaining.step:,} of {remaining.last_step:,} steps in {fmt.duration(remaining.trained_seconds)}",
        ),
        ("speed", "n/a" if rate is None else f"{rate:,.0f} tokens/s in the last start"),
        ("remaining", left),
    ]
    if remaining.seconds:
        finish = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + remaining.seconds))
        rows.append(("finished", f"{finish}, if it runs from now on without a pause"))
    return "\n".join(f"{name:<14} {text}" for name, text in rows)


def describe_model(config: Config) -> str:
    """Write what is exact about a model before anything ran; times are not guessed."""
    model = config.model
    rows = [
        ("model", f"{model.model}, context {model.context_length}, vocabulary {model.vocab_size}"),
        ("parameters", f"{count_parameters(model):,}"),
        ("training", f"{flops_per_token(model) / 1e6:,.1f} MFLOP/token (6 N_matmul + 12 L C T)"),
        ("checkpoint", fmt.num_bytes(checkpoint_bytes(model))),
        ("time", "n/a: no run to go by; start one, and ask again after a dozen steps"),
    ]
    return "\n".join(f"{name:<14} {text}" for name, text in rows)


def as_json(config: Config, remaining: Remaining | None) -> dict[str, Any]:
    """Return the estimate as one object; a part that is not known is null."""
    model = config.model
    throughput = estimate = None
    if remaining is not None and remaining.seconds is not None:
        throughput = {
            "value": remaining.tokens_per_second,
            "low": None,
            "high": None,
            "source": "metrics.jsonl",
            "quality": "ok" if remaining.low_seconds is not None else "few steps",
        }
        estimate = {
            "total_steps": remaining.last_step,
            "estimated_hours": remaining.seconds / 3600,
            "fits_in_window": None,
            "verdict": None,
            "low_hours": None if remaining.low_seconds is None else remaining.low_seconds / 3600,
            "high_hours": None if remaining.high_seconds is None else remaining.high_seconds / 3600,
            "sigma_log": None,
        }
    unknown = [
        "max_training_hours",
        "profile_name",
        "profile",
        "dataset_info",
        "breakdown",
        "memory",
    ]
    unknown += ["scaling", "milestones", "cost", "loss", "actual"]
    return {
        "schema": SCHEMA,
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": {"parameters": count_parameters(model), "flops_per_token": flops_per_token(model)},
        "run": str(remaining.run_dir) if remaining else None,
        "estimate": estimate,
        "throughput": throughput,
        **dict.fromkeys(unknown),
    }
