"""`--dry_run`: what a run would do and need. No torch, nothing is written."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from gpt2lab import paths
from gpt2lab.checkpoint import catalog
from gpt2lab.config.request import RunRequest, describe_change
from gpt2lab.config.settings import to_flat
from gpt2lab.distributed.processor import FP16_ON_CPU
from gpt2lab.errors import printable
from gpt2lab.finetuning.rows import InstructionData
from gpt2lab.interop.core import open_core
from gpt2lab.planner.auto import (
    NOT_COUNTED,
    NOT_MEASURED,
    TrainingPlanner,
    describe_memory,
    estimate_here,
    memory_here,
)
from gpt2lab.planner.estimate import Estimate, MemoryNeed
from gpt2lab.planner.job import batch_as_json
from gpt2lab.planner.machine import detect_hardware
from gpt2lab.runs.console import Console
from gpt2lab.training.plan import describe_plan
from gpt2lab.training.recipe import PRETRAINING, Recipe
from gpt2lab.training.resolve import resolve
from gpt2lab.training.start import Start


def print_plan(
    request: RunRequest,
    recipe: Recipe = PRETRAINING,
    *,
    world_size: int = 1,
    planner: TrainingPlanner | None = None,
    as_json: bool = False,
) -> int:
    """Print the resolved plan, as text or as one JSON object, and return the exit code."""
    start = resolve(request, recipe, world_size=world_size, set_aside=False, planner=planner)
    open_core(start)  # rejects what is no bundle
    if planner is not None and planner.measures(request) and start.checkpoint is None:
        note = NOT_MEASURED.format(start.plan.batch.micro_batch)
        start = dataclasses.replace(start, warnings=(*start.warnings, note))
    if os.environ.get("RANK", "0") != "0":
        return 0
    need = memory_here(start.config, start.plan)
    found = estimate_here(start)
    if as_json:
        print(json.dumps(_as_json(start, need, found)))
        return 0
    console = Console()
    for label, text in _rows(start, need, found):
        console.print(f"{label:<14} {text}" if label else text)
    console.close(patience=None)
    if isinstance(start.data, InstructionData):
        print(printable(start.data.example(), keep="\n"))
    return 0


def _as_json(start: Start, need: MemoryNeed, found: Estimate | None) -> dict[str, Any]:
    plan, is_counted = start.plan, not start.config.system.fsdp_offload
    return {
        "run_dir": str(start.run_dir),
        "parameters": plan.parameters,
        "flops_per_token": plan.flops_per_token,
        **batch_as_json(plan.batch),
        "max_steps": plan.max_steps,
        "tokens": start.tokens,
        "epochs": start.epochs,
        "epochs_by_source": start.epochs_by_source(),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "disk_bytes": plan.disk_bytes,
        "memory": {
            "needed_bytes": round(need.needed) if is_counted else None,
            "available_bytes": None if need.available is None else round(need.available),
            "fits": need.fits,
            "largest_mini_batch_size": need.largest_micro_batch,
        },
        "forecast_seconds": dataclasses.asdict(found.seconds) if found else None,
        "unused_targets": start.order.unused_targets,
        "data_fingerprint": start.data.fingerprint,
        "resumes_from": start.checkpoint.step if start.checkpoint else None,
        "sets_aside": _newer(start),
        "branch_from": start.branch,
        "changes": start.changes,
        "warnings": _warnings(start),
        "config": to_flat(start.config),
    }


def _rows(start: Start, need: MemoryNeed, found: Estimate | None) -> Iterator[tuple[str, str]]:
    """Yield what the plan is, each line with its label; the table of numbers has labels of its own."""
    plan, is_counted = start.plan, not start.config.system.fsdp_offload
    yield "run", paths.display_path(start.run_dir)
    yield "data", start.describe_data()
    yield from (("source", line) for line in start.describe_sources())
    yield "", describe_plan(plan, start.config, tokens=start.tokens, epochs=start.epochs)
    yield "memory", describe_memory(need) if is_counted else NOT_COUNTED
    yield "forecast", found.describe_time() if found else "n/a: this GPU is not known"
    if start.initial:
        yield "begins with", paths.display_path(start.initial.target.folder)
    if start.checkpoint:
        step = start.checkpoint.step
        of = f" of {start.branch['run']}, as a branch" if start.branch else ""
        left = f"{plan.max_steps - step} to go"
        if start.is_complete:
            left = f"already complete at step {plan.max_steps}: nothing to do"
        yield "resumes from", f"step {step}{of} ({left})"
    if newer := _newer(start):
        yield "sets aside", f"{', '.join(newer)}: newer than the step to resume from"
    for name, change in start.changes.items():
        yield "changed", f"{name}: {describe_change(name, change)}"
    yield from (("warning", warning) for warning in _warnings(start))
    if isinstance(start.data, InstructionData):
        yield "example", "the first conversation, trained on between >>> and <<<"


def _newer(start: Start) -> list[str]:
    """Return the checkpoints that a resume from an earlier step moves to superseded-..."""
    if start.checkpoint is None or start.branch:
        return []
    return [folder.name for folder in catalog.newer_than(start.run_dir, start.checkpoint.step)]


def _warnings(start: Start) -> list[str]:
    warnings, system = list(start.warnings), start.config.system
    if system.device == "cuda" and detect_hardware().is_cpu:
        warnings.append("device cuda: no GPU here; memory and forecast are of this machine's CPU")
    elif system.dtype == "fp16" and detect_hardware(device=system.device).is_cpu:
        warnings.append(FP16_ON_CPU)
    return warnings
