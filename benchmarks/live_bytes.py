"""Count the bytes of tensors that a training step, or any other call, holds at its peak, on a CPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.training.train_step import train_step


def peak_of_step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: GlobalBatch,
    strategy: Strategy,
) -> int:
    """Take three steps and return the peak of the last: what lives between steps, and what the profiler sees come.

    The first two bring the optimizer's state, and under DDP gradients that stay; four tokens are enough for that.
    """

    def step(batch: GlobalBatch) -> None:
        train_step(model, optimizers, batch, 1e-3, strategy=strategy, grad_clip=1.0, seed=0)

    micro = batch.micro_batches[-1]
    few = dataclasses.replace(micro, tokens=micro.tokens[:1, :4], targets=micro.targets[:1, :4])
    warm_up = dataclasses.replace(batch, micro_batches=(dataclasses.replace(few, index=0),))
    step(warm_up)
    step(warm_up)
    held: list[torch.Tensor] = list(model.parameters())
    held += [p.grad for p in model.parameters() if p.grad is not None]
    held += [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    held += [micro.tokens for micro in batch.micro_batches]
    return sum(_here(tensor).nbytes for tensor in held) + peak_of_call(lambda: step(batch))


def peak_of_call(call: Callable[[], object]) -> int:
    """Make a call and return the most bytes of tensors that it held at a time, besides those that were there."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    assert changes
    return max(0, *itertools.accumulate(event.nbytes() for event in changes))


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
