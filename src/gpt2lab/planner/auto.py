"""What a start may settle by itself: `--preset`, `--mini_batch_size auto` and `--fit_schedule`. No torch.

Each ends as a plain number on the command line, so that the checkpoint stores it and a resume uses it again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpt2lab.config.command_line import Command
from gpt2lab.config.derived import CPU_COMPILE_FROM_STEPS
from gpt2lab.config.schema import LENGTHS
from gpt2lab.errors import ConfigError
from gpt2lab.planner import calibration, card_presets, hardware, machine, measuring, profiles
from gpt2lab.planner.deadline import Window, steps_that_fit
from gpt2lab.planner.estimate import MEMORY_TARGET, estimate
from gpt2lab.planner.here import Seen, here, look
from gpt2lab.planner.job import Job
from gpt2lab.planner.scoring import job_of_start
from gpt2lab.training.start import Start

MAX_BATCH = 128
_MARGIN = 0.02  # of the window, besides what the interval's upper bound leaves


def free_memory(command: Command, start: Start) -> float | None:
    """Return the bytes that this process could use, for a search; None where none is asked for, or unknown."""
    if not _finds(command, start):
        return None
    seen = _look(start)
    if not seen.is_cpu:
        return min(gpu.memory_free for gpu in seen.gpus)  # the fullest card of this node
    available = machine.available_memory()
    return available / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if available else None


def fitted(command: Command, start: Start, memory: Sequence[float | None]) -> Command | None:
    """Return the command with what it left open settled, None if it left nothing open.

    `memory`: what `free_memory` said on each process; what the poorest can do, all can.

    Raises: ConfigError or NoSourceError if that cannot be done here.
    """
    preset = card_presets.fitted(command, start)
    finds = _finds(command, start)
    if not finds and not command.verbs.fit_schedule:
        return preset
    command, seen = preset or command, _look(start)
    if finds:
        least = min((some for some in memory if some is not None), default=None)
        command = command.with_flags(f"--mini_batch_size={_find_mini_batch(start, seen, least)}")
    if command.verbs.fit_schedule:
        command = command.with_flags(
            f"--max_steps={_steps_in_window(start, seen)}", instead_of=LENGTHS
        )
    return command


def _finds(command: Command, start: Start) -> bool:
    return command.finds_mini_batch and start.checkpoint is None


def _look(start: Start) -> Seen:
    return Seen(()) if start.config.system.device == "cpu" else look()


def _job(start: Start, seen: Seen) -> Job:
    system, steps = start.config.system, start.plan.max_steps
    bf16 = system.dtype == "bf16" or (system.dtype == "auto" and seen.native_bf16)
    compiled = system.compile == "on" or (
        system.compile == "auto" and not (seen.is_cpu and steps < CPU_COMPILE_FROM_STEPS)
    )
    return job_of_start(start, dtype="bf16" if bf16 else "fp32", compiled=compiled)


def _find_mini_batch(start: Start, seen: Seen, free: float | None) -> int:
    found = measuring.find_batch_size(
        _job(start, seen),
        start.run_dir.parent,
        max_batch=MAX_BATCH,
        memory_bytes=free,
        target=MEMORY_TARGET,
    )
    return int(found["mini_batch_size"])


def _steps_in_window(start: Start, seen: Seen) -> int:
    hours = start.config.length.max_hours
    if hours is None:
        raise ConfigError("--fit_schedule needs --max_hours: the window that the run must end in")
    known, job = hardware.load(), _job(start, seen)
    on, ratios = here(
        seen,
        known,
        calibration.read(start.run_dir.parent),
        processes=job.world,
        dtype=job.dtype,
        compiled=job.compiled,
        parallel=job.parallel,
    )
    if on.rates.source == "cpu-matmul":
        raise ConfigError(
            "--fit_schedule: this machine was not measured yet, and a guess would waste the window or miss it; first "
            f"python scripts/estimate_time.py --measure --model {job.config.model.model}"
        )
    window = Window(3600 * hours, _MARGIN * 3600 * hours)
    target = profiles.find(None, known).memory_target
    steps = steps_that_fit(
        job,
        window,
        lambda other: estimate(other, on, known, ratios=ratios, memory_target=target),
        at_most=job.max_steps,
    )
    if steps < 1:
        raise ConfigError(f"--max_hours {hours:g} is too short for a single step of this run")
    return steps
