"""A tensor spread over processes by its rows: each holds a piece, of which all can make the whole again.

torch's DTensor with one placement, Shard(0): of n rows process r of W holds rows r * ceil(n / W) and following, as
torch.chunk cuts them.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def is_spread(tensor: torch.Tensor) -> bool:
    """Tell whether this process holds but a piece of the tensor."""
    return isinstance(tensor, DTensor)


def own_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this process's rows of a whole tensor, a view; of a small one it may be none."""
    pieces, rank = tensor.chunk(mesh.size()), mesh.get_local_rank()
    return pieces[rank] if rank < len(pieces) else tensor[:0]


def spread(rows: torch.Tensor, mesh: DeviceMesh, like: torch.Tensor) -> DTensor:
    """Make the rows of all processes one tensor of the shape of `like`, on the mesh's device. Nothing is sent."""
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; all processes call it together if it is spread. What is offloaded goes by the GPUs."""
    if not isinstance(tensor, DTensor):
        return tensor
    there: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return there.full_tensor()


def cut_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return of a whole tensor what its target holds here: a copied piece where the target is spread, else itself.

    Scalars, such as an optimizer's count of steps, are never spread.
    """
    if not isinstance(target, DTensor) or tensor.shape != target.shape:
        return tensor
    rows = own_rows(tensor, target.device_mesh).clone()
    return spread(rows, target.device_mesh, tensor).to(target.to_local().device)
