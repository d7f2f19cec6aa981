"""CPU time that a rank's main thread spends on a step outside the model, in each parallel mode. No torch.

On a GPU this is time in which the CPU may not keep the GPU busy. The weights are small, so that calls cost the time,
not arithmetic. Waiting for other ranks is not counted. Parts: from the end of the backward pass to the numbers of the
step (gradient norm, clipping, loss), and from there to the end (optimizer, exchange of weights, clearing).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.sharing import count_cores, run_worker
from gpt2lab.config.schema import Optimizer, Parallel

WORKER = Path(__file__).with_name("step_overhead_worker.py")
# Goals for the milliseconds after the loss is known, at GPT-2 124M's number of parameters.
GOALS: dict[Parallel, float] = {"ddp": 2.0, "zero1": 3.0}
GOAL_LAYERS = 12


def measure(
    *,
    modes: tuple[Parallel, ...],
    optimizer: Optimizer,
    layers: tuple[int, ...],
    processes: int,
    steps: int,
) -> dict[str, Any]:
    """Return milliseconds and operators of each mode and number of layers; the ranks have one thread each.

    Raises: ConfigError with more than two processes a core; GPT2LabError if a measurement fails.
    """
    count_cores(processes)
    rows = []
    for n_layer in layers:
        for mode in modes:
            words = [mode, optimizer, str(n_layer), str(steps)]
            found = run_worker(WORKER, words, processes=processes, threads=1)
            has_goal = n_layer == GOAL_LAYERS and optimizer == "adamw"
            goal = GOALS.get(mode) if has_goal else None
            rows.append({"mode": mode, "n_layer": n_layer, "goal_ms": goal, **found})
    return {"optimizer": optimizer, "processes": processes, "steps": steps, "rows": rows}


def describe(result: dict[str, Any]) -> str:
    """Write the rows as a table."""
    lines = [
        f"{result['optimizer']}, {result['processes']} ranks on the CPU, medians of {result['steps']} steps, "
        "milliseconds of the main thread's CPU time",
        "",
        "| mode | parameters | norm, clipping, loss | operators | update, exchange, clearing | operators | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        goal, after = row["goal_ms"], row["after_ms"]
        met = "" if goal is None else f"{goal:g} ({'met' if after <= goal else 'missed'})"
        lines.append(
            f"| {row['mode']} | {row['parameters']} | {row['before_ms']:.2f} | {row['operators_before']} "
            f"| {after:.2f} | {row['operators_after']} | {met} |"
        )
    return "\n".join(lines)
