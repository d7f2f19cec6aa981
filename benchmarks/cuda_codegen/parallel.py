"""The step of one rank of several, counted without a GPU and without the other ranks: graphs, recompiles, operators.

The process group is torch's `fake`, which sends nothing. The worker is parallel_worker.py. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cuda_codegen.device import Architecture, build
from gpt2lab.config.schema import ActivationCheckpointing, Parallel
from gpt2lab.errors import ConfigError

_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class ParallelCase:
    """A step of GPT-2 124M cut to `n_layer` layers, bf16 by autocast, two micro-batches."""

    parallel: Parallel
    recompute: ActivationCheckpointing = "none"
    n_layer: int = 2
    micro_batch: int = 8
    world_size: int = 2


def generate(architecture: Architecture, cases: list[ParallelCase]) -> list[dict[str, Any]]:
    """Count the cases in a process of its own, whose torch believes in a GPU and in other ranks.

    Raises: ConfigError if something is missing or the process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = ("device.so", "cases.json", "result.json")
        library, asked, result = (Path(folder) / name for name in names)
        build(library)
        asked.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
        environment = {**os.environ, "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'src'}"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = folder
        command = [sys.executable, "-m", "benchmarks.cuda_codegen.parallel_worker", architecture]
        command += [str(library), str(asked), str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ConfigError(f"codegen: the compiling process failed: {last}")
        counted: list[dict[str, Any]] = json.loads(result.read_text())
    return counted


def describe(architecture: Architecture, counted: list[dict[str, Any]]) -> str:
    """Return the counts as a Markdown table."""
    lines = [
        f"GPT-2 124M, bf16, cuDNN's attention, {architecture}, steps of two micro-batches; a rank of several",
        "",
        "| mode | recomputes | layers | graphs | generated kernels | graph breaks | compiled in steps 2, 3 "
        "| operators outside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in counted:
        case, after = row["case"], row["compiled"]
        forward = sum(not graph["is_backward"] for graph in row["graphs"])
        lines.append(
            f"| {case['parallel']} | {case['recompute']} | {case['n_layer']} "
            f"| {forward} + {len(row['graphs']) - forward} "
            f"| {sum(graph['kernels'] for graph in row['graphs'])} | {row['graph_breaks']} "
            f"| {after[1] - after[0]}, {after[2] - after[1]} | {sum(row['outside'].values())} |"
        )
    return "\n".join(lines)
