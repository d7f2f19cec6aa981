"""ZeRO stage 1: every rank holds a full replica of the weights, but optimizer state only for its own rows.

Rajbhandari et al. 2020, arXiv:1910.02054. Once gradients are summed, each rank updates its rows of every weight and
sends them to the others. AdamW is element-wise, so the weights equal those of one unsharded optimizer; bit by bit where
each rank's rows of a weight fill a CPU's vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpt2lab.config.derived import BUCKET_BYTES
from gpt2lab.distributed.sharding import from_local_rows, local_rows
from gpt2lab.errors import ConfigError

Pairs = list[tuple[nn.Parameter, nn.Parameter]]  # a weight, and its rows here: the same memory


def shard_optimizer_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], mesh: DeviceMesh
) -> None:
    """Make fresh optimizers over full weights optimize only this rank's rows of them, in place.

    Their groups keep the weights' names in `param_names`, as torch does for named parameters. `step` exchanges the
    rows; the caller clears the model's own gradients.

    Raises: ConfigError for an optimizer that needs full matrices.
    """
    check_elementwise(optimizers, "zero1")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        assert not optimizer.state, "its state would be lost"
        pairs: Pairs = []
        for group in optimizer.param_groups:
            here = [
                (p, nn.Parameter(from_local_rows(local_rows(p.detach(), mesh), mesh, p)))
                for p in group["params"]
            ]
            group["param_names"] = [names[id(parameter)] for parameter, _ in here]
            group["params"] = [rows for _, rows in here]
            pairs += here
        _hook(optimizer, pairs, mesh)


def _hook(optimizer: torch.optim.Optimizer, pairs: Pairs, mesh: DeviceMesh) -> None:
    """Make each step begin by taking the rows' gradients, and end by exchanging the rows."""

    def take_gradients(*unused: Any) -> None:
        for parameter, own in pairs:
            if parameter.grad is not None:
                own.grad = from_local_rows(local_rows(parameter.grad, mesh), mesh, parameter)

    def exchange(*unused: Any) -> None:
        for _, own in pairs:
            own.grad = None
        for bucket in _buckets(pairs):
            _send_rows(bucket, mesh)

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(exchange)


def _buckets(pairs: Pairs) -> list[Pairs]:
    """Group weights that travel in one message: many small ones, or one large one."""
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
    """Gather the rows of all ranks in one message; each rank's rows are padded to the longest."""
    world_size = mesh.size()
    sizes = [math.ceil(len(p) / world_size) * p[0].numel() for p, _ in pairs]
    message = pairs[0][0].new_zeros(sum(sizes))
    for chunk, (_, own) in zip(message.split(sizes), pairs, strict=True):  # type: ignore[no-untyped-call]
        rows = own.to_local().flatten()  # type: ignore[attr-defined]
        chunk[: rows.numel()] = rows
    gathered = message.new_empty(world_size * message.numel())
    dist.all_gather_into_tensor(gathered, message, group=mesh.get_group())
    chunks = gathered.view(world_size, -1).split(sizes, dim=1)  # type: ignore[no-untyped-call]
    for (parameter, _), chunk in zip(pairs, chunks, strict=True):
        parameter.copy_(chunk.flatten()[: parameter.numel()].view_as(parameter))


def check_elementwise(optimizers: list[torch.optim.Optimizer], mode: str) -> None:
    """Check that every optimizer updates each number independently of its matrix.

    Raises: ConfigError.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.AdamW):
            raise ConfigError(
                f"parallel {mode}: {type(optimizer).__name__} updates full matrices, which no rank has then; "
                f"use --parallel ddp"
            )
