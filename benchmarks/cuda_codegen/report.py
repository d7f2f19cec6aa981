"""Count the training step of GPT-2 as torch.compile makes it for a GPU, and print it as a table. No torch.

Kernels and bytes grow linearly with the layers, so two small numbers of layers give those of any.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.cuda_codegen.device import CARDS, Architecture, build
from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import ModelConfig, ModelName, Optimizer
from gpt2lab.errors import ConfigError

Kernel = Literal["cudnn", "flash", "efficient"]
Graphs = Literal["auto", "one", "regions"]
GROUPS = ("cross-entropy", "LayerNorm", "GELU", "embedding", "other")
MICRO_BATCHES = 2  # in a step
_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A training step: a preset cut to `n_layer` layers, bf16 by autocast, two micro-batches."""

    n_layer: int
    micro_batch: int
    attention: Kernel = "cudnn"
    ddp_bucket_mb: float | None = None  # as inside DDP; None: one process
    machine_code: bool = False  # also registers, stack and spills
    preset: ModelName = "gpt2"
    by_region: bool = False  # compiled as a deep model is
    optimizer: Optimizer = "adamw"
    loss_kernel: bool = True  # the loss by our kernel, not by torch.compile's

    @property
    def model(self) -> ModelConfig:
        """The model's settings."""
        return dataclasses.replace(preset(self.preset).model, n_layer=self.n_layer)


def generate(architecture: Architecture, cases: list[Case]) -> list[dict[str, Any]]:
    """Count the cases in a process of its own, whose torch believes in a GPU.

    Raises: ConfigError if something is missing or the process fails.
    """
    return count_in_process("generate", architecture, cases)


def count_in_process(
    worker: str, architecture: Architecture, cases: Sequence[Any]
) -> list[dict[str, Any]]:
    """Start a module of this package for cases, which are dataclasses, and return what it counted of each.

    Raises: ConfigError if something is missing or the process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = ("device.so", "cases.json", "result.json")
        library, asked, result = (Path(folder) / name for name in names)
        build(library)
        asked.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
        environment = {**os.environ, "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'src'}"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = folder
        command = [sys.executable, "-m", f"{__package__}.{worker}", architecture]
        command += [str(library), str(asked), str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ConfigError(f"codegen: the compiling process failed: {last}")
        counted: list[dict[str, Any]] = json.loads(result.read_text())
    return counted


def summary(counted: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of one case that grow linearly with the layers; those of graphs are per micro-batch.

    A region of a deep model is one graph, whose kernels run once for each call.
    """
    found: dict[str, float] = {"launches outside": sum(counted["outside"].values())}
    for direction in ("forward", "backward"):
        graphs = [g for g in counted["graphs"] if g["is_backward"] == (direction == "backward")]
        calls = [graph["calls"] / MICRO_BATCHES for graph in graphs]
        pairs = list(zip(calls, graphs, strict=True))
        ran = [(times * k["runs"], k) for times, graph in pairs for k in graph["kernels"]]
        found[f"{direction} graphs"] = len(graphs)
        found[f"{direction} kernels"] = sum(runs for runs, _ in ran)
        found[f"{direction} library calls"] = sum(n * sum(g["library"].values()) for n, g in pairs)
        found[f"{direction} bytes"] = sum(runs * k["bytes"] for runs, k in ran)
        for group in GROUPS:
            size = sum(runs * k["bytes"] for runs, k in ran if k["group"] == group)
            found[f"{direction} bytes, {group}"] = size
        found[f"{direction} peak"] = max(g["peak_bytes"] for g in graphs)
        if direction == "forward":
            found["kept"] = sum(times * graph["left_bytes"] for times, graph in pairs)
    return found


def extrapolate(small: dict[str, Any], large: dict[str, Any], n_layer: int) -> dict[str, float]:
    """Return the summary at `n_layer` layers by the line through two cases."""
    a, b = small["case"]["n_layer"], large["case"]["n_layer"]
    low, high = summary(small), summary(large)
    return {name: low[name] + (n_layer - a) * (high[name] - low[name]) / (b - a) for name in low}


def kernels_of(cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all kernels of some cases."""
    return [kernel for case in cases for graph in case["graphs"] for kernel in graph["kernels"]]


def count(
    *,
    architectures: tuple[Architecture, ...],
    micro_batches: tuple[int, ...],
    layers: tuple[int, int],
    model: ModelName,
    graphs: Graphs,
    attention: Kernel,
    ddp_bucket_mb: float | None,
    loss: Literal["kernel", "compiled"],
) -> dict[str, Any]:
    """Count every architecture and micro-batch size."""
    n_layer = preset(model).model.n_layer
    by_region = graphs == "regions" or (graphs == "auto" and n_layer >= REGIONS_FROM_LAYERS)
    tables = []
    for architecture in architectures:
        cases = [
            Case(
                layer,
                B,
                attention,
                ddp_bucket_mb,
                machine_code=layer == layers[0],
                preset=model,
                by_region=by_region,
                loss_kernel=loss == "kernel",
            )
            for B in micro_batches
            for layer in layers
        ]
        counted = generate(architecture, cases)
        for at, B in enumerate(micro_batches):
            pair = counted[2 * at : 2 * at + 2]
            code = [row for k in kernels_of(pair[:1]) for row in k["machine_code"]]
            tables.append(
                {
                    "architecture": architecture,
                    "card": CARDS[architecture].name,
                    "micro_batch": B,
                    "attention": attention,
                    "ddp_bucket_mb": ddp_bucket_mb,
                    "model": model,
                    "n_layer": n_layer,
                    "by_region": by_region,
                    "counted": extrapolate(pair[0], pair[1], n_layer),
                    "graph_breaks": max(case["graph_breaks"] for case in pair),
                    "recompiles": max(case["recompiles"] for case in pair),
                    "int64": [k["name"] for k in kernels_of(pair[:1]) if k["index"] == "int64"],
                    "loss": [
                        {"name": k["name"], "bytes": k["bytes"], **row}
                        for k in kernels_of(pair[:1])
                        if k["group"] == "cross-entropy"
                        for row in k["machine_code"]
                    ],
                    **{
                        f"most_{name}": max(row[name] for row in code)
                        for name in ("registers", "stack_bytes", "spill_bytes")
                    },
                    "cases": pair,
                }
            )
    return {"layers": layers, "tables": tables}


def describe(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    return "\n\n".join(_describe_one(table, result["layers"]) for table in result["tables"])


def _describe_one(table: dict[str, Any], layers: tuple[int, int]) -> str:
    counted, bucket = table["counted"], table["ddp_bucket_mb"]

    def row(title: str, name: str, show: Callable[[float], str] = "{:,.0f}".format) -> str:
        forward, backward = counted[f"forward {name}"], counted[f"backward {name}"]
        return f"| {title} | {show(forward)} | {show(backward)} | {show(forward + backward)} |"

    def gigabytes(size: float) -> str:
        return f"{size / 1e9:.1f}"

    context = preset(table["model"]).model.context_length
    lines = [
        f"{table['model']}, {table['n_layer']} layers (from {layers[0]} and {layers[1]}), B {table['micro_batch']}, "
        f"T {context}, bf16, {table['attention']} attention, {table['architecture']} ({table['card']})"
        + (f", in DDP with buckets of {bucket:g} MiB" if bucket else "")
        + (", compiled by region:" if table["by_region"] else ":"),
        "",
        "| per micro-batch | forward | backward | both |",
        "|---|---|---|---|",
        row("graphs", "graphs"),
        row("generated kernels", "kernels"),
        row("library calls (products, attention)", "library calls"),
        row("GB moved by generated kernels", "bytes", gigabytes),
        *(row(f"- {group}", f"bytes, {group}", gigabytes) for group in GROUPS),
        "",
        f"GB held at the peak, what the forward pass keeps included, weights not: forward "
        f"{gigabytes(counted['forward peak'])}, backward {gigabytes(counted['backward peak'])}"
        + (" (of one graph)" if counted["forward graphs"] > 1 else "")
        + f"; the forward pass keeps {gigabytes(counted['kept'])}",
        f"graph breaks {table['graph_breaks']}, recompiles in the second step {table['recompiles']}; "
        f"{counted['launches outside']:,.0f} operators outside graphs in a step of two micro-batches",
        "seconds of processor time to compile: "
        + ", ".join(f"{c['seconds']:.0f} ({c['case']['n_layer']} layers)" for c in table["cases"]),
        f"at most {table['most_registers']} registers, {table['most_stack_bytes']} bytes of stack, "
        f"{table['most_spill_bytes']} bytes of spills a thread",
        *(f"loss: {_describe_code(row)}" for row in table["loss"]),
        f"kernels that index in int64: {len(table['int64'])}",
        *(f"- {name}" for name in table["int64"]),
    ]
    return "\n".join(lines)


def _describe_code(row: dict[str, Any]) -> str:
    loops = f", {row['loops']} of them in loops" if row["loops"] else ""
    return (
        f"{row['instructions']} instructions{loops}, {row['registers']} registers, "
        f"{row['spill_bytes']} bytes of spills, {row['settings']['num_warps']} warps, "
        f"{row['bytes'] / 1e9:.2f} GB: {row['name']}"
    )
