"""How long a run still takes, read from its own metrics. No torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.config.schema import Config
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import count_parameters, training_flops_per_token
from gpt2lab.planner import memory
from gpt2lab.planner.interval import Interval
from gpt2lab.planner.progress import Progress, frequencies
from gpt2lab.planner.report_json import blank, bounds
from gpt2lab.runs import history
from gpt2lab.runs.history import read_json, spent_seconds

MILESTONES = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Remaining:
    """What is known of a run that has begun."""

    run_dir: Path
    config: Config
    step: int
    last_step: int
    pace: Interval | None  # seconds of a step in the last start; None before there is one
    seconds: Interval | None  # left
    events_seconds: float  # of them, in evaluations, samples and checkpoints
    milestones: tuple[tuple[int, Interval], ...]  # (step, seconds from now)
    trained_seconds: float  # in steps, over all starts
    elapsed_seconds: float  # of all starts, without the pauses between them
    last_written: float  # Unix seconds
    environment: dict[str, Any]
    estimated: dict[str, Any] | None  # estimate.json

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing is left."""
        return self.step >= self.last_step

    @property
    def throughput(self) -> Interval | None:
        """Tokens a second in the last start."""
        return self.pace.inverse_of(self.config.batch.total_batch_size) if self.pace else None


def last_written_run(checkpoint_dir: Path) -> Path | None:
    """Return the run that wrote to its metrics last, or None."""
    files = checkpoint_dir.glob(f"*/{catalog.METRICS}")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


def estimate_remaining(run_dir: Path) -> Remaining:
    """Project the rest of a run from the pace of its last start and the cost of its events.

    Raises: ConfigError if the folder is not a run that has begun, or its log is of other settings.
    """
    config, events = history.read_config(run_dir), history.read_events(run_dir)
    begun = [event for event in events if event["event"] == "begin"]
    if not begun:
        raise ConfigError(f"{run_dir}: has not begun to train; nothing to go by yet")
    begin, steps = begun[-1], history.current(events, "step")
    if begin["tokens_per_step"] != config.batch.total_batch_size:
        raise ConfigError(
            f"{run_dir}: {catalog.METRICS} is of {begin['tokens_per_step']} tokens a step, config.json of "
            f"{config.batch.total_batch_size}: a log from another config; restore the run's own files"
        )
    last_step, attempt = begin["max_steps"], history.last_attempt(events)
    progress = Progress(last_step=last_step, frequencies=frequencies(config))
    feed(progress, events, attempt)
    step = max(steps, default=0)
    left = progress.remaining_interval(step)
    spent = sum(e["step_seconds"] for e in steps.values())
    return Remaining(
        run_dir=run_dir,
        config=config,
        step=step,
        last_step=last_step,
        pace=progress.pace(),
        seconds=left,
        events_seconds=progress.events_left(step),
        milestones=_milestones(progress, config, step, last_step),
        trained_seconds=spent,
        elapsed_seconds=spent_seconds(events),
        last_written=events[-1]["time"],
        environment=(read_json(run_dir / "run.json") or {}).get("environment") or {},
        estimated=read_json(run_dir / "estimate.json"),
    )


def feed(progress: Progress, events: list[dict[str, Any]], attempt: int) -> None:
    """Give a progress what one start has logged; another start may have run on another machine."""
    for event in events:
        if event["attempt"] != attempt:
            continue
        if event["event"] == "step":
            progress.record_step(event["step_seconds"])
        elif "seconds" in event and event["event"] != "done":
            progress.record_event(event["event"], event["seconds"])


def _milestones(
    progress: Progress, config: Config, step: int, last_step: int
) -> tuple[tuple[int, Interval], ...]:
    """Return when which share of the run will be done, events on the way included."""
    left, pace = progress.remaining_interval(step), progress.pace()
    if left is None or pace is None or step >= last_step:
        return ()
    found = []
    for share in MILESTONES:
        at = round(share * last_step)
        if at > step:
            found.append((at, left.scaled((at - step) / (last_step - step))))
    return tuple(found)


def describe(remaining: Remaining, now: float) -> str:
    """Write the projection for people."""
    rate, left = remaining.throughput, remaining.seconds
    done = f"{remaining.step:,} of {remaining.last_step:,} steps in {fmt.duration(remaining.elapsed_seconds)}"
    lines = [
        f"run          {paths.for_people(remaining.run_dir)}",
        f"done         {done} (steps alone {fmt.duration(remaining.trained_seconds)})",
        "speed        "
        + (
            "n/a: a few steps more are needed"
            if rate is None
            else f"{fmt.count(rate.value)} tok/s in the last start ({fmt.count(rate.low)} ... {fmt.count(rate.high)})"
        ),
    ]
    if remaining.is_complete:
        return "\n".join([*lines, "remaining    nothing: the run is complete", *_score(remaining)])
    if left is None:
        return "\n".join([*lines, "remaining    n/a: no steps of the last start to go by"])
    lines.append(
        f"remaining    {fmt.duration(left.value)} ({fmt.duration(left.low)} ... {fmt.duration(left.high)}, 80 %), "
        f"of it {fmt.duration(remaining.events_seconds)} evaluations, samples and checkpoints"
    )
    lines.append(f"finished     {_clock(now + left.value)}, if it runs from now on without a pause")
    tokens = remaining.config.batch.total_batch_size
    rows = [
        [
            f"{at / remaining.last_step:.0%}",
            f"{at:,}",
            fmt.count(at * tokens),
            _clock(now + span.value),
            f"{_clock(now + span.low)[5:]} ... {_clock(now + span.high)[5:]}",
        ]
        for at, span in remaining.milestones
    ]
    table = fmt.table(["milestone", "step", "tokens", "when", "80 %"], rows)
    return "\n".join([*lines, "", table])


def _score(remaining: Remaining) -> list[str]:
    actual = (remaining.estimated or {}).get("actual")
    if not isinstance(actual, dict) or actual.get("time_accuracy") is None:
        return []
    inside = "inside" if actual.get("inside_interval") else "outside"
    return [
        f"forecast     {actual['time_accuracy']:.0f} % of the actual {fmt.duration(3600 * actual['hours'])}, "
        f"{inside} its 80 % interval"
    ]


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def as_json(remaining: Remaining, now: float) -> dict[str, Any]:
    """Return the projection as one object; a part that is not known is null."""
    config = remaining.config
    model, left, rate = config.model, remaining.seconds, remaining.throughput
    tokens = config.batch.total_batch_size
    result = blank() | {
        "run": str(remaining.run_dir),
        "model": {
            "parameters": count_parameters(model),
            "flops_per_token": training_flops_per_token(config),
        },
        "dataset_info": {"training_tokens": remaining.last_step * tokens},
        "actual": (remaining.estimated or {}).get("actual"),
        "throughput": None
        if rate is None
        else bounds(rate) | {"source": "log", "quality": "ok", "mfu": None},
    }
    if left is not None:
        result["estimate"] = {
            "total_steps": remaining.last_step,
            "estimated_hours": left.value / 3600,
            "fits_in_window": None,
            "verdict": None,
            "low_hours": left.low / 3600,
            "high_hours": left.high / 3600,
            "sigma_log": None,
            "completed_steps": remaining.step,
            "elapsed_hours": remaining.elapsed_seconds / 3600,
        }
        result["breakdown"] = {
            "train_s": left.value - remaining.events_seconds,
            "events_s": remaining.events_seconds,
        }
        result["milestones"] = [
            {"step": at, "tokens": at * tokens, "time": now + span.value}
            | {"low": now + span.low, "high": now + span.high}
            for at, span in remaining.milestones
        ]
    result["memory"] = _memory(config, remaining.environment)
    return result


def _memory(config: Config, environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a process of the run's last start needs; None where that is not known, as of offloaded weights."""
    world, micro = environment.get("world_size"), environment.get("mini_batch_size")
    system, T = config.system, config.model.context_length
    if system.fsdp_offload or not world or not micro:
        return None
    if environment.get("dtype") not in ("fp32", "bf16"):
        return None
    need = memory.predict(
        config.model,
        micro_batch=micro,
        accumulation=config.batch.total_batch_size // T // world // micro,
        dtype=environment["dtype"],
        sharing=memory.Sharing(world, system.parallel, system.activation_checkpointing),
        optimizer=config.optim.optimizer,
        tuning=config.tuning,
    )
    return dataclasses.asdict(need) | {"total": need.tensors}
