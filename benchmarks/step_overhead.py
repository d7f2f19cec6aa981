"""CPU time that a rank's main thread spends on a step outside the model, in each parallel mode.

torchrun --nproc_per_node=2 benchmarks/step_overhead.py [MODE ...]

On a GPU this is time in which the CPU may not keep the GPU busy. The weights are small, so that calls cost the time,
not arithmetic. Waiting for other ranks is not counted. Parts: from the end of the backward pass to the numbers of the
step (gradient norm, clipping, loss), and from there to the end (optimizer, exchange of weights, clearing).
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import nn

from gpt2lab.config.schema import ModelConfig, OptimConfig, Optimizer, Parallel, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.training.train_step import is_finite, train_step

STEPS, WARM_UP = 30, 5
LAYERS = (12, 48)  # 148 and 580 parameters, as gpt2 and gpt2-xl


class _Marked(Strategy):
    """Notes when the backward pass has ended."""

    began = 0.0

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        self.began = time.thread_time()
        return super().clip_grad_norm(model, max_norm)


def measure(
    runtime: Runtime, parallel: Parallel, layers: int, optimizer: Optimizer
) -> tuple[int, float, float]:
    """Return the number of parameters, and the median milliseconds of both parts."""
    config = ModelConfig(n_layer=layers, n_head=1, n_embd=16, context_length=16, vocab_size=64)
    strategy = _Marked(runtime, SystemConfig(device="cpu", dtype="fp32", parallel=parallel))
    model = build_model(config, seed=0, device=runtime.device)
    wrapped = strategy.prepare(model)
    optim = OptimConfig(optimizer=optimizer)
    optimizers = build_optimizers(model, optim, device=runtime.device)
    optimizers = strategy.shard_optimizer_state(model, optimizers)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    micro = (MicroBatch(ids, ids, runtime.rank, True),)
    batch = GlobalBatch(micro, 16 * runtime.world_size, 0, 0, runtime.world_size, None, 0.0)
    parts: list[tuple[float, float]] = []
    for number in range(WARM_UP + STEPS):
        known = 0.0

        def accept(loss: float, norm: float) -> bool:
            nonlocal known
            known = time.thread_time()
            return is_finite(loss, norm)

        train_step(
            wrapped,
            optimizers,
            batch,
            1e-3,
            strategy=strategy,
            grad_clip=1.0,
            seed=number,
            accept=accept,
        )
        parts.append((known - strategy.began, time.thread_time() - known))
    before, after = (1000 * statistics.median(part) for part in zip(*parts[WARM_UP:], strict=True))
    return len(list(model.parameters())), before, after


def main(modes: list[str]) -> None:
    """Print a line for each mode and number of parameters."""
    runtime = Runtime()
    runtime.use(SystemConfig(device="cpu"))
    for layers in LAYERS:
        for mode in modes or get_args(Parallel):
            parallel, _, optimizer = mode.partition("+")
            count, before, after = measure(runtime, parallel, layers, optimizer or "adamw")  # type: ignore[arg-type]
            if runtime.rank == 0:
                print(f"{mode}, {count} parameters: {before:.2f} ms + {after:.2f} ms", flush=True)
    runtime.close()


if __name__ == "__main__":
    main(sys.argv[1:])
