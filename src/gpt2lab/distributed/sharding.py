"""Tensors sharded over the ranks by rows: torch's DTensor with one placement, Shard(0).

Rank r of W holds the r-th chunk of ceil(n / W) of the n rows, as torch.chunk divides them.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether this rank holds only its rows of the tensor."""
    return isinstance(tensor, DTensor)


def local_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a full tensor as a view; a rank may have no rows of a small tensor."""
    chunks, rank = tensor.chunk(mesh.size()), mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else tensor[:0]


def from_local_rows(rows: torch.Tensor, mesh: DeviceMesh, like: torch.Tensor) -> DTensor:
    """Return a sharded tensor of the shape of `like` made of every rank's rows, on the mesh's device; sends nothing."""
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its rows; if it is sharded, all ranks call this together.

    Offloaded rows are gathered on the GPUs.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return on_mesh.full_tensor()


def shard_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a full tensor sharded like `target`: a copy of this rank's rows, or the tensor itself if it is unsharded.

    Scalars, such as an optimizer's step count, are never sharded.
    """
    if not isinstance(target, DTensor) or tensor.shape != target.shape:
        return tensor
    rows = local_rows(tensor, target.device_mesh).clone()
    return from_local_rows(rows, target.device_mesh, tensor).to(target.to_local().device)
