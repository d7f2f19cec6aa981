"""Fully sharded data parallel: weights, gradients and optimizer state sharded by rows, gathered block by block.

PyTorch's `fully_shard` (FSDP2), like ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054. A block's weights are
gathered for its forward pass, freed, and gathered again for its backward pass, whose gradients are reduce-scattered at
once. This repeats for every micro-batch: gradients held until the last one, as in the other modes, would fill the
memory that this mode saves. Embeddings and the final norm are needed throughout a pass; they and their gradients stay
unsharded until the last pass of a step.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpt2lab.distributed.sharding import Bucket, divide, rows_of
from gpt2lab.model.gpt import GPT

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard(
    model: GPT,
    trained: nn.Module,
    mesh: DeviceMesh,
    *,
    offload: bool,
    param_dtype: Literal["fp32", "bf16"] = "fp32",
) -> None:
    """Shard each weight in place.

    `trained` is the model or contains it: the module whose forward is the full pass. `offload`: rows, gradients and
    optimizer state live in CPU memory, the GPU holds only the weights in use. `param_dtype`: what the blocks' matrices
    are gathered in; rows stay fp32, and gradients are summed in fp32.
    """
    from torch.distributed.fsdp import (  # slow
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    # Pinned memory lets a GPU copy while it computes; torch cannot pin without a GPU.
    pin = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy()
    by_block, precision = set(model.blocks.parameters()), MixedPrecisionPolicy()
    if param_dtype == "bf16":
        # Autocast rounds the blocks' matrices before each product anyway. Norms compute in fp32, and a compiled step
        # does not round the sums of biases' gradients: both are gathered unrounded, with what is outside the blocks.
        by_block = {p for p in by_block if p.dim() == 2}
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    fully_shard(trained, mesh=mesh, offload_policy=policy, ignored_params=by_block)
    for block in model.blocks:
        others = set(block.parameters()) - by_block
        fully_shard(
            block, mesh=mesh, mp_policy=precision, offload_policy=policy, ignored_params=others
        )


def keep_unsharded(model: nn.Module, *, after_backward: bool) -> None:
    """Set whether weights and gradients outside the blocks stay unsharded after the coming backward pass.

    Gradients that stay are summed over the ranks in the last pass only.
    """
    sharded = cast("FSDPModule", model)
    sharded.set_reshard_after_backward(not after_backward, recurse=False)
    sharded.set_requires_gradient_sync(not after_backward, recurse=False)


def skeleton(model: GPT) -> GPT:
    """Return a copy of an unsharded model's modules, with adapters, whose weights take no memory."""
    weights = {id(p): nn.Parameter(p.to("meta")) for p in model.parameters()}
    return copy.deepcopy(model, weights)


@torch.no_grad()
def gather_model(model: GPT, bare: GPT, mesh: DeviceMesh, device: torch.device) -> GPT:
    """Return an unsharded model with all weights, built from its skeleton `bare`; all ranks call this together.

    Many weights travel in one message. Weights are gathered in fp32, whatever a step gathers.
    """
    plain = copy.deepcopy(bare).to_empty(device=device)
    pairs = [(p, model.get_parameter(name)) for name, p in plain.named_parameters()]
    for each in divide(pairs):
        bucket = Bucket(each, mesh, gradients_stay=False)
        bucket.send(bucket.pack([rows_of(own).to(device) for own in bucket.owned]))
    return plain
