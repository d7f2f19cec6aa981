"""Take steps as one rank of several, on a GPU that is not there; started by parallel.py.

python -m benchmarks.cuda_codegen.parallel_worker sm_80|sm_90 LIBRARY CASES.json RESULT.json

DDP's reducer, FSDP, ZeRO-1, the optimizer and the step are the real ones. Left out, because each would read numbers
that are not there: DDP's comparison of the ranks' shapes, its second order of buckets, and its statistics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
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
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.cuda_codegen import generate
from benchmarks.cuda_codegen.kernels import Graph
from benchmarks.cuda_codegen.parallel import ParallelCase
from benchmarks.cuda_codegen.report import MICRO_BATCHES
from gpt2lab.config.schema import ModelConfig, OptimConfig, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed import sharding, zero1
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.training.train_step import train_step

_STEPS = 3


def take_steps(case: ParallelCase) -> dict[str, Any]:
    """Compile and take three steps; return graphs, what compiled when, and what ran beside them in the last."""
    torch._dynamo.reset()
    counters.clear()
    graphs: list[Graph] = []
    after: list[int] = []
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        generate._attention("cudnn"),
        generate._kept(graphs),
        _one_rank_of(case.world_size, case.parallel),
    ):
        runtime = Runtime()
        runtime.is_distributed, runtime.world_size = True, case.world_size
        system = SystemConfig(
            device="cuda",
            dtype="bf16",
            compile="on",
            parallel=case.parallel,
            activation_checkpointing=case.recompute,
            fsdp_param_dtype=case.param_dtype,
        )
        runtime.use(system)
        with runtime.device:
            config = ModelConfig(n_layer=case.n_layer)
            model = GPT(config)
            ids = torch.zeros(2, case.micro_batch, config.context_length, dtype=torch.int64)
        strategy = Strategy(runtime, system)
        with unset_fake_temporarily():  # it computes the rank's place in tensors
            assert strategy._mesh
        trained = strategy.prepare(model)
        optimizers = strategy.shard_optimizer_state(model, build_optimizers(model, OptimConfig()))
        if isinstance(trained, DistributedDataParallel):
            _leave_out_what_reads_numbers(trained, sums=case.parallel == "ddp")
        micro = [MicroBatch(x.clone(), x.clone(), i, i == 1) for i, x in enumerate(ids)]
        sequences = 2 * case.micro_batch * case.world_size
        targets = sequences * config.context_length
        batch = GlobalBatch(tuple(micro), targets, 0, 0, sequences, None, 0.0)
        how: Any = {"strategy": strategy, "grad_clip": 1.0, "seed": 0}
        for _ in range(_STEPS):
            for graph in graphs:
                graph.calls = 0
            with generate._Launches() as launches:
                train_step(trained, optimizers, batch, 1e-4, **how)
            after.append(counters["stats"]["unique_graphs"])
    return {
        "case": dataclasses.asdict(case),
        "graphs": [
            {"is_backward": g.is_backward, "kernels": _runs(g) * g.calls // MICRO_BATCHES}
            for g in graphs
        ],
        "graph_breaks": sum(counters["graph_break"].values()),
        "compiled": after,
        "outside": dict(launches.counted.most_common()),
    }


def _runs(graph: Graph) -> int:
    """Return how often a graph starts a generated kernel."""
    return sum(kernel.runs for kernel in graph.kernels)


@contextmanager
def _one_rank_of(world_size: int, parallel: str) -> Iterator[None]:
    """Be rank 0 of a process group that sends nothing, on a device that has streams."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    scatter = sharding.reduce_scatter_single

    def reduce_scatter(output: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = scatter(output, *args, **options)
        # The fake one's future holds None, NCCL's the output.
        return SimpleNamespace(wait=work.wait, get_future=lambda: _done([output]))

    cuda = {
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *unused: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "default_generators": (torch.Generator(),),
    }
    with contextlib.ExitStack() as changed:
        for name, value in cuda.items():
            changed.enter_context(patch.object(torch.cuda, name, value))
        changed.enter_context(
            patch("torch.nn.parallel.distributed._verify_param_shape_across_processes")
        )
        if parallel != "fsdp":
            changed.enter_context(patch.object(zero1, "reduce_scatter_single", reduce_scatter))
        try:
            yield
        finally:
            dist.destroy_process_group()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _leave_out_what_reads_numbers(trained: DistributedDataParallel, *, sums: bool) -> None:
    if sums:  # as DDP does without a hook; the fake one's future holds None
        # Unannotated: DDP takes only annotations that are no text.
        trained.register_comm_hook(None, lambda unused, bucket: _all_reduce(bucket))
    trained.reducer = _Reducer(trained.reducer)  # type: ignore[assignment]
    trained.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)


def _all_reduce(bucket: Any) -> Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer())
    return _done(bucket.buffer())


class _Reducer:
    """DDP's reducer, which keeps its first buckets."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _rebuild_buckets(self) -> bool:
        return False


class _Stream:
    """torch.cuda.Stream."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for nothing."""

    def record_event(self, event: Any = None) -> _Event:
        """Mark nothing."""
        return event or _Event()


class _Event:
    """torch.cuda.Event."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, *stream: Any) -> None:
        """Mark nothing."""

    def wait(self, *stream: Any) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


def main(cases: str, result: str) -> None:
    """Count all cases, and write one JSON list."""
    inductor_config.force_disable_caches = True
    inductor_config.compile_threads = 1
    inductor_config.assume_aligned_inputs = True  # a tensor without memory has no address to check
    inductor_config.profile_bandwidth = True  # kernels are read as generate.py reads them
    functorch_config.force_non_lazy_backward_lowering = True
    functorch_config.graphsafe_rng_functionalization = False  # it needs the card's own generator
    found = [take_steps(ParallelCase(**fields)) for fields in json.loads(Path(cases).read_text())]
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[3:])
