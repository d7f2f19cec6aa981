"""The step of one rank of several, counted without a GPU and without the other ranks: graphs, recompiles, operators.

The process group is torch's `fake`, which sends nothing. The worker is parallel_worker.py. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.cuda_codegen.device import Architecture
from benchmarks.cuda_codegen.report import count_in_process
from gpt2lab.config.schema import ActivationCheckpointing, Parallel


@dataclass(frozen=True)
class ParallelCase:
    """A step of GPT-2 124M cut to `n_layer` layers, bf16 by autocast, two micro-batches."""

    parallel: Parallel
    recompute: ActivationCheckpointing = "none"
    n_layer: int = 2
    micro_batch: int = 8
    world_size: int = 2
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # what fsdp gathers blocks' matrices in


def generate(architecture: Architecture, cases: list[ParallelCase]) -> list[dict[str, Any]]:
    """Count the cases in a process of its own, whose torch believes in a GPU and in other ranks.

    Raises: ConfigError if something is missing or the process fails.
    """
    return count_in_process("parallel_worker", architecture, cases)


def describe(architecture: Architecture, counted: list[dict[str, Any]]) -> str:
    """Return the counts as a Markdown table."""
    lines = [
        f"GPT-2 124M, bf16, cuDNN's attention, {architecture}, steps of two micro-batches; a rank of several",
        "",
        "| mode, gathered in | recomputes | layers | graphs | generated kernels run | graph breaks "
        "| compiled in steps 2, 3 | operators outside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in counted:
        case, after = row["case"], row["compiled"]
        mode = "fsdp, bf16" if case["param_dtype"] == "bf16" else case["parallel"]
        forward = sum(not graph["is_backward"] for graph in row["graphs"])
        lines.append(
            f"| {mode} | {case['recompute']} | {case['n_layer']} "
            f"| {forward} + {len(row['graphs']) - forward} "
            f"| {sum(graph['kernels'] for graph in row['graphs'])} | {row['graph_breaks']} "
            f"| {after[1] - after[0]}, {after[2] - after[1]} | {sum(row['outside'].values())} |"
        )
    return "\n".join(lines)
