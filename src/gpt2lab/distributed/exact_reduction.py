"""Gradients summed in one order at any world size: 1, 2 or 4 ranks give the same bits.

A single process adds its micro-batches' gradients one after another. This does the same across ranks: each keeps the
gradients of its micro-batches apart; the running sum goes from rank to rank, each adds its own in order, and the last
broadcasts the total. It is slow, as one rank adds at a time, and it holds one gradient per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from gpt2lab.distributed.runtime import Runtime


class ExactReduction:
    """Collects the gradients of this rank's micro-batches and sums those of all ranks in global order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: list[torch.Tensor] = []  # each (number of parameters,), in order

    @contextmanager
    def micro_batch(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Wrap one forward and backward pass; after the last one every rank holds the full sum."""
        yield
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self._kept.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for parameter in parameters:
            parameter.grad = None
        if is_last:
            total, self._kept = self._sum_in_order(self._kept), []
            sums = torch.split(total, [parameter.numel() for parameter in parameters])
            for parameter, gradient in zip(parameters, sums, strict=True):
                parameter.grad = gradient.view_as(parameter)

    def _sum_in_order(self, kept: list[torch.Tensor]) -> torch.Tensor:
        rank, last = self._runtime.rank, self._runtime.world_size - 1
        if rank == 0:
            total, rest = kept[0], kept[1:]
        else:
            total, rest = torch.empty_like(kept[0]), kept
            dist.recv(total, src=rank - 1)
        for gradient in rest:
            total += gradient
        if rank < last:
            dist.send(total, dst=rank + 1)
        if self._runtime.is_distributed:
            dist.broadcast(total, src=last)
        return total

    def sum_losses(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all micro-batches' losses, () nats, in global order."""
        return sum(torch.cat(self._runtime.gather(torch.stack(losses).cpu())), torch.zeros(()))
