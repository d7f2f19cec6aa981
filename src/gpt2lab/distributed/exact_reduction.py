"""Gradients summed in one order, whatever the number of processes: the same bits on 1, 2 or 4 of them.

A process alone adds its micro-batches' gradients one after another. This does the same across processes: each keeps
the gradients of its own micro-batches apart; the running sum is handed from process to process, each adds its own in
order, and the last one tells all. Slow, as the processes add one after another, and it holds one gradient for every
micro-batch of a process's share; chosen for its promise, not for its speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from gpt2lab.distributed.runtime import Runtime


class ExactReduction:
    """Collects the gradients of this process's micro-batches and sums all processes' in global order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: list[torch.Tensor] = []  # each (number of parameters,), in order

    @contextmanager
    def micro_batch(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Around one forward and backward pass; after the last one every process holds the whole sum."""
        yield
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept.append(torch.cat([_gradient(p).reshape(-1) for p in parameters]))
        for parameter in parameters:
            parameter.grad = None
        if is_last:
            total, self._kept = self._sum_in_order(self._kept), []
            pieces = torch.split(total, [parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

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
        everyone = self._runtime.gather(torch.stack(losses).cpu())
        total = torch.zeros(())
        for loss in torch.cat(everyone):
            total += loss
        return total


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
