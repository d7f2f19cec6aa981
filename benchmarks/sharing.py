"""Several processes of few threads against one of many, at equal batch: tokens/s a core, bytes sent. No torch.

Each measurement is a fresh process (or group of them) on the CPU, in turns; one process comes first and last, and how
far those two are apart says what the numbers are worth. Tokens per second of processor time bear with a busy machine,
but leave out how long processes wait for each other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import BatchConfig, Config, ModelName, Parallel, SystemConfig
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.planner.communication import step_bytes, wire_share
from gpt2lab.planner.job import Job

WORKER = Path(__file__).with_name("sharing_worker.py")
MODES: tuple[Parallel, ...] = ("ddp", "zero1", "fsdp")


def compare_modes(
    *,
    model_name: ModelName,
    world: int,
    micro_batch: int,
    micro_steps: int,
    steps: int,
    dtype: str,
) -> dict[str, Any]:
    """Return tokens/s, bytes and losses of one process and of `world` ones in each mode.

    One process takes `world` times the micro-steps, so that all train on the same batch. All use the same cores.

    Raises: ConfigError with more than two processes a core; GPT2LabError if a measurement fails.
    """
    cores = count_cores(world)
    threads = max(1, cores // world)
    config = preset(model_name).model
    tokens = micro_steps * world * micro_batch * config.context_length
    batch = BatchConfig(total_batch_size=tokens, mini_batch_size=micro_batch)

    def measure(processes: int, parallel: str) -> dict[str, Any]:
        words = [model_name, parallel, dtype, str(micro_batch)]
        words += [str(micro_steps * world // processes), str(steps)]
        own = threads if processes > 1 else min(cores, world * threads)
        return run_worker(WORKER, words, processes=processes, threads=own)

    before = measure(1, "ddp")
    found = {mode: measure(world, mode) for mode in MODES}
    after = measure(1, "ddp")
    for mode, result in found.items():
        system = SystemConfig(parallel=mode)
        job = Job(Config(model=config, batch=batch, system=system), steps, world, "fp32", False)
        result["expected_bytes"] = step_bytes(job, on_gpu=False)
    return {
        "model": model_name,
        "processes": world,
        "threads_each": threads,
        "cores": min(cores, world * threads),
        "micro_batch": micro_batch,
        "micro_steps": micro_steps,
        "dtype": dtype,
        "alone": [before, after],
        "modes": found,
    }


def count_cores(processes: int) -> int:
    """Return the cores that this process may use.

    Raises: ConfigError with more than two processes a core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not cores or processes > 2 * cores:
        raise ConfigError(
            f"--processes {processes}: this machine has {cores} cores; at most two share one"
        )
    return cores


def run_worker(worker: Path, words: list[str], *, processes: int, threads: int) -> dict[str, Any]:
    """Run a program, as ranks if it is more than one process; return the JSON object that it prints after `result `.

    Raises: GPT2LabError with its last line if it fails.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    root = Path(__file__).resolve().parents[1]
    sources = [str(root), str(root / "src")]
    path = os.pathsep.join(filter(None, [*sources, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), str(worker), *words],
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise GPT2LabError(f"the measurement failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("result "))
    return result


def describe(result: dict[str, Any]) -> str:
    """Write the comparison as a table for people and for the docs."""
    before, after = (run["tokens_per_second"] for run in result["alone"])
    alone, world = (before + after) / 2, result["processes"]
    cores = result["cores"]
    worth = statistics.mean(run["tokens_per_processor_second"] for run in result["alone"])
    rows = [
        f"{result['model']}, {result['dtype']}, uncompiled, {world} processes x {result['threads_each']} threads, "
        f"{result['micro_steps']} micro-steps of {result['micro_batch']} sequences each; one process with {cores} "
        f"threads: {before:,.0f} and {after:,.0f} tokens/s ({abs(after / before - 1):.1%} apart)",
        "",
        "| mode | tokens/s | per core | against one process | by processor time | a process sends in a step "
        "| by the formula | loss |",
        "|---|---|---|---|---|---|---|---|",
        f"| one process | {alone:,.0f} | {alone / cores:,.0f} | 1 | 1 | 0 | 0 | {_loss(result['alone'][0])} |",
    ]
    for mode, run in result["modes"].items():
        sent, expected = (
            sum(count * wire_share(kind, world_size=world) for kind, count in run[key].items())
            for key in ("bytes", "expected_bytes")
        )
        rate = run["tokens_per_second"]
        rows.append(
            f"| {mode} | {rate:,.0f} | {rate / cores:,.0f} | {rate / alone:.2f} "
            f"| {run['tokens_per_processor_second'] / worth:.2f} | {fmt.num_bytes(round(sent))} "
            f"| {fmt.num_bytes(round(expected))} ({sent / expected:.4f}) | {_loss(run)} |"
        )
    return "\n".join(rows)


def _loss(run: dict[str, Any]) -> str:
    first, last = run["losses"]
    return f"{first:.5f} -> {last:.5f}"
