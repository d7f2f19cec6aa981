"""Take training steps on a GPU that is not there and keep what Inductor writes for them; a program of its own.

python -m benchmarks.cuda_codegen.generate sm_80|sm_90 LIBRARY CASES.json RESULT.json

Model, loss, strategy, optimizer and step are the trainer's own; tensors have shapes and no values.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from benchmarks.cuda_codegen import device

if __name__ == "__main__":
    device.install(cast(device.Architecture, sys.argv[1]), Path(sys.argv[2]))

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cuda_codegen.kernels import Graph, read_graph, resources
from benchmarks.cuda_codegen.report import Case
from gpt2lab.config import derived
from gpt2lab.config.schema import OptimConfig, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed import strategy
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.model import loss_kernel
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.training.train_step import train_step

_STEPS = 2  # the second finds what the first compiled


def take_steps(case: Case) -> dict[str, Any]:
    """Compile, take two steps of two micro-batches; return what was generated and what ran beside it."""
    torch._dynamo.reset()
    counters.clear()
    graphs: list[Graph] = []
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _attention(case.attention),
        _kept(graphs),
        _regions(case.by_region),
    ):
        runtime = Runtime()
        system = SystemConfig(device="cuda", dtype="bf16", compile="on")
        runtime.use(system)
        with runtime.device:
            model = GPT(case.model)
            ids = torch.zeros(2, case.micro_batch, case.model.context_length, dtype=torch.int64)
        if case.loss_kernel:  # without the check, which reads values
            model.loss_kernel = loss_kernel.cross_entropy_
        how = strategy.Strategy(runtime, system)
        trained = how.prepare(model)
        optim = OptimConfig(optimizer=case.optimizer)
        optimizers = build_optimizers(model, optim)
        micro = [MicroBatch(x.clone(), x.clone(), i, i == 1) for i, x in enumerate(ids)]
        batch = GlobalBatch(tuple(micro), 2 * ids[0].numel(), 0, 0, 2 * case.micro_batch, None)
        after: list[int] = []
        device.waits.clear()
        began = time.process_time()
        seconds = []
        for _ in range(_STEPS):
            for graph in graphs:
                graph.calls = 0
            with _inside_ddp(case.ddp_bucket_mb), _Launches() as launches:
                train_step(
                    trained,
                    optimizers,
                    batch,
                    1e-4,
                    strategy=how,
                    grad_clip=1.0,
                    seed=0,
                    accept=None,  # pipelined, as the trainer's
                )
            after.append(counters["stats"]["unique_graphs"])
            seconds.append(time.process_time() - began)
    return {
        "case": dataclasses.asdict(case),
        "graphs": [dataclasses.asdict(graph) for graph in graphs],
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiles": after[-1] - after[0],
        "seconds": seconds[0],
        "waits": list(device.waits),
        "outside": dict(launches.counted.most_common()),
    }


@contextmanager
def _regions(by_region: bool) -> Iterator[None]:
    """Compile the step by region, or as one graph, however many layers it has."""
    with patch.object(derived, "REGIONS_FROM_LAYERS", 1 if by_region else math.inf):
        yield


@contextmanager
def _kept(graphs: list[Graph]) -> Iterator[None]:
    """Read the code of every graph instead of loading it; called, it returns outputs without values."""
    original = GraphLowering._compile_to_module

    def read(self: GraphLowering) -> Any:
        wrapper, _ = self.codegen()
        graph = read_graph(wrapper.value, is_backward=self.is_backward)
        graphs.append(graph)
        outputs = [_like(output) for output in self.graph_outputs]

        def call(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            graph.calls += 1
            return [torch.empty_strided(*o[:2], **o[2]) if o else None for o in outputs]

        return SimpleNamespace(__file__="not written", call=call)

    GraphLowering._compile_to_module = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphLowering._compile_to_module = original  # type: ignore[method-assign]


def _like(output: Any) -> tuple[list[int], list[int], dict[str, Any]] | None:
    """Return sizes, strides and options of an output of Inductor's; None for an output that is None."""
    if output.maybe_get_size() is None:
        return None
    sizes, strides = ([int(n) for n in x] for x in (output.get_size(), output.get_stride()))
    return sizes, strides, {"dtype": output.get_dtype(), "device": output.get_device()}


@contextmanager
def _attention(kernel: str) -> Iterator[None]:
    """Make torch's attention the kernel of that name; on a GPU torch asks the card and its libraries."""
    aten, original = torch.ops.aten, nn.functional.scaled_dot_product_attention

    def attend(
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Any:
        if kernel == "flash" and attn_mask is None:
            flash = aten._scaled_dot_product_flash_attention
            return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if kernel == "cudnn":
            operator = aten._scaled_dot_product_cudnn_attention
        else:
            operator = aten._scaled_dot_product_efficient_attention
        return operator(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


@contextmanager
def _inside_ddp(bucket_mb: float | None) -> Iterator[None]:
    """Let Dynamo see the DistributedDataParallel whose forward pass it compiles: it asks for the size of buckets."""
    if bucket_mb is None:
        yield
        return
    ddp = SimpleNamespace(bucket_bytes_cap=int(bucket_mb * 2**20))
    DistributedDataParallel._active_ddp_module = ddp  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = None


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators outside compiled graphs (views and fresh memory launch nothing); notes copies that wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile within."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and not name.startswith("empty"):
            self.counted[name] += 1
        options = kwargs or {}
        if name == "_to_copy" and str(options.get("device")) == "cpu":
            device.waits.extend([] if options.get("non_blocking") else ["copy to the CPU"])
        return func(*args, **(kwargs or {}))


def main(cases: str, result: str) -> None:
    """Count all cases, and write one JSON list."""
    inductor_config.force_disable_caches = True
    inductor_config.compile_threads = 1
    inductor_config.use_static_cuda_launcher = False  # it keeps no PTX
    inductor_config.assume_aligned_inputs = True  # a tensor without memory has no address to check
    inductor_config.profile_bandwidth = True  # write the bytes that a kernel moves beside it
    functorch_config.force_non_lazy_backward_lowering = True
    found = []
    for fields in json.loads(Path(cases).read_text()):
        case = Case(**fields)
        counted = take_steps(case)
        for kernel in (k for graph in counted["graphs"] for k in graph["kernels"]):
            source = kernel.pop("source")
            kernel["machine_code"] = resources(kernel["name"], source) if case.machine_code else []
        found.append(counted)
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[3:])
