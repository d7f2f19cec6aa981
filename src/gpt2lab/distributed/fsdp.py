"""Fully sharded: weights, gradients and optimizer state by rows, gathered block by block while they are needed.

PyTorch's `fully_shard` (FSDP2), in the manner of ZeRO stage 3, Rajbhandari et al. 2020, arXiv:1910.02054. A block's
weights are gathered for its forward pass, dropped, and gathered again for its backward pass, whose gradients are summed
and split at once. That happens for every micro-batch: held back to the last one, as in the other modes, gradients would
fill the memory that this mode is for. Embeddings and last norm are needed from a pass's beginning to its end; they and
their gradients stay whole until a step's last pass has ended.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gpt2lab.distributed.sharding import whole
from gpt2lab.model.gpt import GPT


def shard(model: GPT, trained: nn.Module, mesh: DeviceMesh, *, offload: bool) -> None:
    """Leave of each weight this process's rows, in place.

    `trained` is the model or holds it: the module whose forward is the whole pass. `offload`: rows, gradients and
    optimizer state live in the CPU's memory, the GPU holds what it works on.
    """
    # Pinned: so that a GPU copies while it works. Without a GPU torch cannot pin.
    pin = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(trained, mesh=mesh, offload_policy=policy)


def keep_whole(model: nn.Module, *, after_backward: bool) -> None:
    """Say whether what is outside the blocks shall stay whole after the coming backward pass, for the next one.

    Of both weights and gradients, which are then summed over the processes in the last pass alone.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(not after_backward, recurse=False)
    model.set_requires_gradient_sync(not after_backward, recurse=False)


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients to at most `max_norm`; return the L2 norm of all processes' rows before, ()."""
    rows = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    squares = nn.utils.get_total_norm(rows) ** 2
    dist.all_reduce(squares)  # of offloaded gradients over gloo: runtime.py's group has both
    norm = squares.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_
    torch._foreach_mul_(rows, scale)
    return norm


def skeleton(model: GPT) -> GPT:
    """Return a copy of a plain model's modules, adapters too, whose weights take no memory."""
    weights = {id(p): nn.Parameter(p.to("meta")) for p in model.parameters()}
    return copy.deepcopy(model, weights)


@torch.no_grad()
def gather_model(model: GPT, bare: GPT, device: torch.device) -> GPT:
    """Return a plain model with all weights, shaped as its skeleton `bare`, on every process; all call it together."""
    plain = copy.deepcopy(bare).to_empty(device=device)
    for name, parameter in plain.named_parameters():
        parameter.copy_(whole(model.get_parameter(name)))
    return plain
