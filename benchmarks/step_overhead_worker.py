"""Take steps in one parallel mode; print the CPU's work outside the model. Started by step_overhead.py."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2lab.config.schema import ModelConfig, OptimConfig, Optimizer, Parallel, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.training.train_step import is_finite, train_step

WARM_UP = 5  # steps


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run while it is entered, views too: each costs the CPU microseconds."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Marked(Strategy):
    """Notes when the backward pass has ended; from there on `counting` counts operators."""

    began = 0.0
    counting: _Operators | None = None

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        if self.counting is not None:
            self.counting.__enter__()  # type: ignore[no-untyped-call]
        self.began = time.thread_time()
        return super().clip_grad_norm(model, max_norm)


def main(parallel: Parallel, optimizer: Optimizer, layers: int, steps: int) -> None:
    """Take steps of one sequence a rank; rank 0 prints one JSON object."""
    runtime = Runtime()
    runtime.use(SystemConfig(device="cpu"))
    config = ModelConfig(n_layer=layers, n_head=1, n_embd=16, context_length=16, vocab_size=64)
    strategy = _Marked(runtime, SystemConfig(device="cpu", dtype="fp32", parallel=parallel))
    model = build_model(config, seed=0, device=runtime.device)
    wrapped = strategy.prepare(model)
    optimizers = build_optimizers(model, OptimConfig(optimizer=optimizer))
    optimizers = strategy.shard_optimizer_state(model, optimizers)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    micro = (MicroBatch(ids, ids, runtime.rank, True),)
    batch = GlobalBatch(micro, 16 * runtime.world_size, 0, 0, runtime.world_size, None, 0.0)

    def step(number: int, known: Callable[[], None]) -> None:
        """Take a step; call `known` when its loss and norm are."""

        def accept(loss: float, norm: float) -> bool:
            known()
            return is_finite(loss, norm)

        how: Any = {"strategy": strategy, "grad_clip": 1.0, "seed": number, "accept": accept}
        train_step(wrapped, optimizers, batch, 1e-3, **how)

    parts: list[tuple[float, float]] = []
    for number in range(WARM_UP + steps):
        knew: list[float] = []
        step(number, lambda knew=knew: knew.append(time.thread_time()))  # type: ignore[misc]
        parts.append((knew[0] - strategy.began, time.thread_time() - knew[0]))
    before, after = (1000 * statistics.median(part) for part in zip(*parts[WARM_UP:], strict=True))
    strategy.counting = operators = _Operators()  # type: ignore[no-untyped-call]
    counts: list[int] = []
    step(WARM_UP + steps, lambda: counts.append(operators.count))
    operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if runtime.rank == 0:
        result = {
            "parameters": len(list(model.parameters())),
            "before_ms": before,
            "after_ms": after,
            "operators_before": counts[0],
            "operators_after": operators.count - counts[0],
        }
        print("result " + json.dumps(result), flush=True)
    runtime.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))  # type: ignore[arg-type]
