"""Tensors sharded over the ranks by rows: torch's DTensor with one placement, Shard(0).

Rank r of W holds the r-th chunk of ceil(n / W) of the n rows, as torch.chunk divides them. DTensor's module takes
seconds to import, so it is imported where a tensor is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpt2lab.optim.clipping import scale_gradients, sum_of_squares

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Tell whether this rank holds only its rows of the tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: nothing is sharded
    return module is not None and isinstance(tensor, module.DTensor)


def row_range(rows: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first row and the number of rows that a rank holds; it may be none of a small tensor."""
    chunk = -(-rows // world_size)
    begin = min(rank * chunk, rows)
    return begin, min(chunk, rows - begin)


def local_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a full tensor as a view."""
    place = row_range(len(tensor), rank=mesh.get_local_rank(), world_size=mesh.size())
    return tensor.narrow(0, *place)


def from_local_rows(rows: torch.Tensor, mesh: DeviceMesh, like: torch.Tensor) -> DTensor:
    """Return a sharded tensor of the shape of `like` made of every rank's rows, on the mesh's device; sends nothing."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor; the same memory."""
    return tensor.to_local()  # type: ignore[attr-defined]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its rows; if it is sharded, all ranks call this together.

    Offloaded rows are gathered on the GPUs.
    """
    if not is_sharded(tensor):
        return tensor
    on_mesh: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return on_mesh.full_tensor()


def shard_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a full tensor sharded like `target`: a copy of this rank's rows, or the tensor itself if it is unsharded.

    Scalars, such as an optimizer's step count, are never sharded.
    """
    if not is_sharded(target) or tensor.shape != target.shape:
        return tensor
    rows = local_rows(tensor, target.device_mesh).clone()
    return from_local_rows(rows, target.device_mesh, tensor).to(target.to_local().device)


def clip_rows(rows: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale this rank's rows of the gradients to a global L2 norm of at most `max_norm`; return the norm before, ()."""
    squares = sum_of_squares(rows)
    dist.all_reduce(squares)  # offloaded gradients reduce by gloo: the group has both backends
    norm = squares.sqrt()
    scale_gradients(rows, norm, max_norm)
    return norm.float()
