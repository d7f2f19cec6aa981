"""ZeRO stage 1: every process holds all weights, but an optimizer's state for its own rows alone.

Rajbhandari et al. 2020, arXiv:1910.02054. After the gradients were summed, each process updates its rows of every
weight and sends them to the others. AdamW treats each number alone, so the weights come out as from one optimizer that
holds everything; bit by bit, if each process's part of a weight fills a CPU's vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpt2lab.distributed.sharding import own_rows, spread
from gpt2lab.errors import ConfigError

BUCKET_BYTES = 25 * 2**20  # of weights that are sent at once

Pairs = list[tuple[nn.Parameter, nn.Parameter]]  # a weight, and its rows here: the same memory


def share_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], mesh: DeviceMesh
) -> None:
    """Turn fresh optimizers over whole weights into ones over this process's rows of them.

    Their groups keep the weights' names in `param_names`, as torch does for named parameters. `step` sends the rows;
    after it, or instead of it, the caller clears the model's own gradients.

    Raises: ConfigError for an optimizer that must see whole matrices.
    """
    check_elementwise(optimizers, "zero1")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        assert not optimizer.state, "its state would be lost"
        pairs: Pairs = []
        for group in optimizer.param_groups:
            here = [
                (p, nn.Parameter(spread(own_rows(p.detach(), mesh), mesh, p)))
                for p in group["params"]
            ]
            group["param_names"] = [names[id(parameter)] for parameter, _ in here]
            group["params"] = [rows for _, rows in here]
            pairs += here
        _hook(optimizer, pairs, mesh)


def _hook(optimizer: torch.optim.Optimizer, pairs: Pairs, mesh: DeviceMesh) -> None:
    """Have each step begin with the gradients of the rows, and end with everybody's rows."""

    def lend_gradients(*unused: Any) -> None:
        for parameter, own in pairs:
            if parameter.grad is not None:
                own.grad = spread(own_rows(parameter.grad, mesh), mesh, parameter)

    def exchange(*unused: Any) -> None:
        for _, own in pairs:
            own.grad = None
        for bucket in _buckets(pairs):
            _send_rows(bucket, mesh)

    optimizer.register_step_pre_hook(lend_gradients)
    optimizer.register_step_post_hook(exchange)


def _buckets(pairs: Pairs) -> list[Pairs]:
    """Put weights together that travel as one: many small ones, or a large one alone."""
    buckets: list[Pairs] = [[]]
    room = BUCKET_BYTES
    for pair in pairs:
        if buckets[-1] and pair[0].nbytes > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(pair)
        room -= pair[0].nbytes
    return buckets


@torch.no_grad()
def _send_rows(pairs: Pairs, mesh: DeviceMesh) -> None:
    """Give every process the rows of all, in one message; a piece that is short of rows is filled up."""
    processes = mesh.size()
    sizes = [
        math.ceil(len(p) / processes) * p[0].numel() for p, _ in pairs
    ]  # of the fullest pieces
    message = pairs[0][0].new_zeros(sum(sizes))
    for piece, (_, own) in zip(message.split(sizes), pairs, strict=True):  # type: ignore[no-untyped-call]
        mine = own.to_local().flatten()  # type: ignore[attr-defined]
        piece[: mine.numel()] = mine
    everyone = message.new_empty(processes * message.numel())
    dist.all_gather_into_tensor(everyone, message, group=mesh.get_group())
    parts = everyone.view(processes, -1).split(sizes, dim=1)  # type: ignore[no-untyped-call]
    for (parameter, _), part in zip(pairs, parts, strict=True):
        parameter.copy_(part.flatten()[: parameter.numel()].view_as(parameter))


def check_elementwise(optimizers: list[torch.optim.Optimizer], mode: str) -> None:
    """Refuse optimizers whose update of a number depends on others of its matrix.

    Raises: ConfigError.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.AdamW):
            raise ConfigError(
                f"parallel {mode}: {type(optimizer).__name__} updates whole matrices, which no process has then; "
                f"use --parallel ddp"
            )
