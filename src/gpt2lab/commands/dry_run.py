"""`--dry_run`: what a run would do and need. No torch, nothing is written."""

from __future__ import annotations

import dataclasses
import json
import os

from gpt2lab import paths
from gpt2lab.config.request import RunRequest
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import printable
from gpt2lab.finetuning.rows import InstructionData
from gpt2lab.planner.auto import NOT_COUNTED, describe_memory, estimate_here, memory_here
from gpt2lab.runs.console import Console
from gpt2lab.training.extension import Planner
from gpt2lab.training.plan import describe_plan
from gpt2lab.training.recipe import PRETRAINING, Recipe
from gpt2lab.training.resolve import resolve


def print_plan(
    request: RunRequest,
    recipe: Recipe = PRETRAINING,
    *,
    world_size: int = 1,
    planner: Planner | None = None,
    as_json: bool = False,
) -> int:
    """Print the resolved plan, as text or as one JSON object, and return the exit code."""
    start = resolve(request, recipe, world_size=world_size, set_aside=False, planner=planner)
    if os.environ.get("RANK", "0") != "0":
        return 0
    plan = start.plan
    need = memory_here(start.config, plan, train_tokens=start.data.tokens("train"))
    offloaded = start.config.system.fsdp_offload
    found = estimate_here(start)
    if as_json:
        facts = {
            "run_dir": str(start.run_dir),
            "parameters": plan.parameters,
            "flops_per_token": plan.flops_per_token,
            **plan.batch.to_dict(),
            "max_steps": plan.max_steps,
            "tokens": plan.tokens,
            "epochs": plan.epochs,
            "epochs_by_source": start.epochs_by_source(),
            "checkpoint_bytes": plan.checkpoint_bytes,
            "disk_bytes": plan.disk_bytes,
            "memory": {
                "needed_bytes": None if offloaded else round(need.needed),
                "available_bytes": None if need.available is None else round(need.available),
                "fits": need.fits,
                "largest_mini_batch_size": need.largest_micro_batch,
            },
            "forecast_seconds": dataclasses.asdict(found.seconds) if found else None,
            "unused_targets": start.order.unused_targets,
            "data_fingerprint": start.data.fingerprint,
            "resumes_from": start.checkpoint.step if start.checkpoint else None,
            "branch_from": start.branch,
            "changes": start.changes,
            "warnings": start.warnings,
            "config": to_flat(start.config),
        }
        print(json.dumps(facts))
        return 0
    console = Console()
    say = console.print
    say(f"{'run':<14} {paths.display_path(start.run_dir)}")
    say(f"{'data':<14} {start.describe_data()}")
    for line in start.describe_sources():
        say(f"{'source':<14} {line}")
    say(describe_plan(plan, start.config))
    say(f"{'memory':<14} {NOT_COUNTED if offloaded else describe_memory(need)}")
    say(f"{'forecast':<14} {found.describe_time() if found else 'n/a: this GPU is not known'}")
    if start.initial:
        say(f"{'begins with':<14} {paths.display_path(start.initial.target.folder)}")
    if start.checkpoint:
        step = start.checkpoint.step
        of = f" of {start.branch['run']}, as a branch" if start.branch else ""
        say(f"{'resumes from':<14} step {step}{of} ({plan.max_steps - step} to go)")
    for name, (before, now) in start.changes.items():
        say(f"{'changed':<14} {name}: {before} -> {now}")
    for warning in start.warnings:
        say(f"{'warning':<14} {warning}")
    if isinstance(start.data, InstructionData):
        say(f"{'example':<14} the first conversation, trained on between >>> and <<<")
    console.close(patience=None)
    if isinstance(start.data, InstructionData):
        print(printable(start.data.example(), keep="\n"))
    return 0
