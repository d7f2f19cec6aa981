"""Take real steps in one parallel mode; print their time and the bytes sent. Started by sharing.py."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2lab.config.presets import preset
from gpt2lab.config.schema import Config, Dtype, ModelName, Parallel, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.planner.communication import Collective
from gpt2lab.training.train_step import StepStats, train_step

WARM_UP = 2  # steps; the first grows buffers
# torch's names, and which argument holds the full tensor.
_KINDS: dict[str, tuple[Collective, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
}


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts calls and bytes of float tensors; decisions travel as integers and do not count.

    Bytes are those of the full tensor that a collective sums, gathers or scatters, as one rank sees it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, and run whatever it is."""
        kind, place = _KINDS.get(func._schema.name, (None, 0))
        if kind is not None:
            held = args[place]
            for tensor in held if isinstance(held, (list, tuple)) else [held]:
                if tensor.is_floating_point():
                    self.calls[kind] += 1
                    self.bytes[kind] += tensor.nbytes
        elif func.namespace == "_c10d_functional" and "wait" not in func._schema.name:
            raise AssertionError(f"{func}: a collective that is not counted")
        return func(*args, **(kwargs or {}))


def main(
    model_name: ModelName,
    parallel: Parallel,
    dtype: Dtype,
    micro_batch: int,
    micro_steps: int,
    steps: int,
) -> None:
    """Train on random ids, `micro_steps` of `micro_batch` sequences a process; rank 0 prints one JSON object."""
    config: Config = preset(model_name)
    runtime = Runtime()
    runtime.use(SystemConfig(device="cpu"))
    strategy = Strategy(runtime, SystemConfig(dtype=dtype, parallel=parallel))
    model = build_model(config.model, seed=0, device=runtime.device)
    wrapped = strategy.prepare(model)
    optimizers = strategy.shard_optimizer_state(model, build_optimizers(model, config.optim))
    batch = _batch(config, runtime, micro_batch, micro_steps)

    def step(number: int) -> StepStats:
        return train_step(
            wrapped, optimizers, batch, 1e-4, strategy=strategy, grad_clip=1.0, seed=number
        )

    first = step(0).loss
    for number in range(1, WARM_UP):
        step(number)
    seconds, worked = [], []
    for number in range(steps):
        began, cpu_began = time.monotonic(), time.process_time()
        step(WARM_UP + number)
        seconds.append(time.monotonic() - began)
        worked.append(time.process_time() - cpu_began)
    processor_seconds = sum(runtime.gather(statistics.median(worked)))
    with Traffic() as traffic:
        last = step(WARM_UP + steps).loss
    if runtime.rank == 0:
        result = {
            "tokens_per_second": batch.num_targets / statistics.median(seconds),
            "tokens_per_processor_second": batch.num_targets / processor_seconds,
            "seconds": seconds,
            "threads": torch.get_num_threads(),
            "losses": [first, last],
            "bytes": dict(traffic.bytes),
        }
        print("result " + json.dumps(result), flush=True)
    runtime.close()


def _batch(config: Config, runtime: Runtime, micro_batch: int, micro_steps: int) -> GlobalBatch:
    """Return this process's share of a batch that is the same on any number of processes."""
    T, world = config.model.context_length, runtime.world_size
    micro = []
    for number in range(micro_steps):
        index = number * world + runtime.rank
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 50257, (micro_batch, T + 1), generator=generator)
        micro.append(MicroBatch(ids[:, :-1], ids[:, 1:], index, number == micro_steps - 1))
    sequences = micro_batch * micro_steps * world
    return GlobalBatch(tuple(micro), sequences * T, 0, 0, sequences, None, 0.0)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))  # type: ignore[arg-type]
