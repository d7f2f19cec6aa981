"""The remaining time of a run that has begun, predicted from its metrics. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.config.derived import frequencies
from gpt2lab.config.schema import Config
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import count_parameters, training_flops_per_token
from gpt2lab.planner import hardware
from gpt2lab.planner.estimate import device_memory
from gpt2lab.planner.job import Job, ranks_and_micro_batch
from gpt2lab.planner.reports import blank_report, describe_actual
from gpt2lab.runs import history
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.history import WARM_UP, Log, read_json
from gpt2lab.training.progress import MOST_STEPS, Interval, Progress

MILESTONES = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Remaining:
    """What is known of a run that has begun."""

    run_dir: Path
    config: Config
    log: Log
    progress: Progress  # of the last start
    step: int
    last_step: int
    actual: dict[str, Any] | None  # of estimate.json

    @property
    def seconds(self) -> Interval | None:
        """Seconds left; None before there is a pace."""
        return self.progress.remaining_interval(self.step)

    @property
    def throughput(self) -> Interval | None:
        """Tokens a second in the last start."""
        pace = self.progress.pace()
        return pace.inverse_of(self.config.batch.total_batch_size) if pace else None

    def tokens_at(self, step: int) -> int:
        """Tokens up to a step to come; earlier starts may have had another batch."""
        batch, newest = self.config.batch.total_batch_size, self.log.last_step() or {}
        return int(newest.get("tokens", self.step * batch) + (step - self.step) * batch)

    @property
    def milestones(self) -> list[tuple[int, Interval]]:
        """(step, seconds from now) of each share of the run that is still to come, events included."""
        if (left := self.seconds) is None:
            return []
        steps_left = self.last_step - self.step
        at = [round(share * self.last_step) for share in MILESTONES]
        return [(n, left.scaled((n - self.step) / steps_left)) for n in at if n > self.step]


def last_written_run(checkpoint_dir: Path) -> Path | None:
    """Return the run that wrote to its metrics last, or None."""
    files = checkpoint_dir.glob(f"*/{METRICS}")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


def estimate_remaining(run_dir: Path) -> Remaining:
    """Predict the rest of a run from the pace of its last start and the cost of its events.

    Raises: ConfigError if the folder is not a run that has begun, or its log does not match its config.json.
    """
    config, log = history.read_config(run_dir), history.read_log(run_dir)
    if not log:
        raise ConfigError(f"{run_dir}: has not begun to train; there is nothing to measure yet")
    begin = log.last_begin
    if begin is None or "tokens_per_step" not in begin:
        raise ConfigError(
            f"{run_dir}: {METRICS} does not say how long the run is; restore the run's own files"
        )
    if begin["tokens_per_step"] != config.batch.total_batch_size:
        raise ConfigError(
            f"{run_dir}: {METRICS} is of {begin['tokens_per_step']} tokens a step, config.json of "
            f"{config.batch.total_batch_size}: the log is of another config; restore the run's own files"
        )
    last_step, attempt = begin["max_steps"], log.last_attempt
    progress = Progress(last_step=last_step, frequencies=frequencies(config))
    # Another start may have run on another machine.
    taken = log.last_start("step_seconds")[-MOST_STEPS - WARM_UP :]
    for seconds in taken[taken > 0].tolist():
        progress.record_step(seconds)
    for event in log.events:
        stall = history.stall_of(event)
        if event["attempt"] == attempt and stall is not None and event["event"] != "done":
            progress.record_event(event["event"], stall)
    step = int(log.numbers[-1]) if len(log.numbers) else begin["step"]  # of a branch
    actual = (read_json(run_dir / "estimate.json") or {}).get("actual")
    return Remaining(run_dir, config, log, progress, step, last_step, actual)


def describe_remaining(remaining: Remaining, now: float) -> str:
    """Return the prediction as text."""
    rate, left = remaining.throughput, remaining.seconds
    spent = fmt.duration(remaining.log.spent_seconds())
    begins = remaining.log.of_kind("begin")
    own = remaining.step - (begins[0]["step"] if begins else 0)
    of = f", {own:,} of them" if own < remaining.step else ""  # a branch's
    done = f"{remaining.step:,} of {remaining.last_step:,} steps{of} in {spent}"
    trained = fmt.duration(remaining.log.seconds_in_steps())
    speed = "n/a: needs a few more steps"
    if rate is not None:
        around = f"{fmt.count(rate.low)} ... {fmt.count(rate.high)}"
        speed = f"{fmt.count(rate.value)} tok/s in the last start ({around})"
    lines = [
        f"run          {paths.display_path(remaining.run_dir)}",
        f"done         {done} (steps alone {trained})",
        f"speed        {speed}",
    ]
    if remaining.step >= remaining.last_step:
        ended = remaining.log.has_ended
        what = "nothing: the run is complete" if ended else "what follows the last step"
        lines.append(f"remaining    {what}")
        if remaining.actual and remaining.actual.get("time_accuracy") is not None:
            lines.append(f"forecast     {describe_actual(remaining.actual)}")
        return "\n".join(lines)
    if left is None:
        return "\n".join([*lines, "remaining    n/a: the last start has too few steps"])
    lines.append(
        f"remaining    {fmt.duration(left.value)} ({fmt.duration(left.low)} ... {fmt.duration(left.high)}, 80 %), "
        f"of it {fmt.duration(remaining.progress.events_left(remaining.step))} evaluations, samples and checkpoints"
    )
    end = fmt.moment(now + left.value)
    lines.append(f"finished     {end}, if it runs without a pause from now on")
    rows = [
        [
            f"{at / remaining.last_step:.0%}",
            f"{at:,}",
            fmt.count(remaining.tokens_at(at)),
            fmt.moment(now + span.value),
            " ... ".join(fmt.moment(now + at, "%m-%d %H:%M") for at in (span.low, span.high)),
        ]
        for at, span in remaining.milestones
    ]
    table = fmt.table(["milestone", "step", "tokens", "when", "80 %"], rows)
    return "\n".join([*lines, "", table])


def remaining_as_json(remaining: Remaining, now: float) -> dict[str, Any]:
    """Return the prediction as one object; a part that is not known is null."""
    config, left, rate = remaining.config, remaining.seconds, remaining.throughput
    result = blank_report() | {
        "run": str(remaining.run_dir),
        "model": {
            "parameters": count_parameters(config.model),
            "flops_per_token": training_flops_per_token(config),
        },
        "dataset_info": {"training_tokens": remaining.tokens_at(remaining.last_step)},
        "actual": remaining.actual,
        "throughput": None
        if rate is None
        else dataclasses.asdict(rate) | {"source": "log", "quality": "ok", "mfu": None},
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
            "elapsed_hours": remaining.log.spent_seconds() / 3600,
        }
        events = remaining.progress.events_left(remaining.step)
        result["breakdown"] = {"train_s": left.value - events, "events_s": events}
        result["milestones"] = [
            milestone(at, span, tokens=remaining.tokens_at(at), now=now)
            for at, span in remaining.milestones
        ]
    result["memory"] = _memory(config, remaining.run_dir)
    return result


def milestone(step: int, span: Interval, *, tokens: int, now: float) -> dict[str, Any]:
    """Return when a step is reached, `span` seconds from `now`, in Unix seconds."""
    times = {"time": now + span.value, "low": now + span.low, "high": now + span.high}
    return {"step": step, "tokens": tokens} | times


def _memory(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """Return what a rank of the run's last start needs, as estimate.json does; None where it is not known."""
    environment = (read_json(run_dir / "run.json") or {}).get("environment") or {}
    shared, dtype = ranks_and_micro_batch(environment), environment.get("dtype")
    if config.system.fsdp_offload or shared is None or dtype not in ("fp32", "bf16", "fp16"):
        return None
    world_size, size = shared
    compiled, is_cpu = environment.get("compile") == "on", "attention" not in environment
    job = Job(config, 0, world_size, dtype, compiled).with_micro_batch(size)
    need = device_memory(job, hardware.load(), 1.0, is_cpu=is_cpu, available=None)
    context, parts = round(need.overhead), need.tensors
    return dataclasses.asdict(parts) | {"context": context, "total": parts.tensors + context}
