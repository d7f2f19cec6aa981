"""ZeRO stage 1: every rank holds a full replica of the weights, but optimizer state only for its own rows.

Rajbhandari et al. 2020, arXiv:1910.02054. Each rank updates its rows of every weight and sends them to the others. The
weights equal those of one unsharded optimizer; bit by bit where each rank's rows of a weight fill a CPU's vectors.

DDP reduces gradients in buckets during the backward pass; it splits a compiled model's graph so that this holds there
too. Between GPUs each bucket is reduce-scattered: with the new weights, a step sends as much as DDP's all-reduce.
Between CPUs DDP's all-reduce stays: gloo's reduce-scatter is an all-reduce inside, which saves nothing, and any other
order of summation would change the bits from three ranks on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gpt2lab.config.derived import BUCKET_BYTES
from gpt2lab.distributed.sharded_optimizers import sharded
from gpt2lab.distributed.sharding import clip_rows, from_local_rows, local_rows, row_range

Pairs = list[tuple[nn.Parameter, nn.Parameter]]  # a weight, and its rows here: the same memory


def shard_optimizer_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], mesh: DeviceMesh
) -> list[torch.optim.Optimizer]:
    """Return optimizers of this rank's rows in place of fresh ones of full weights.

    Their groups keep the weights' names in `param_names`, as torch does for named parameters. `step` exchanges the
    rows; the caller clears the model's own gradients.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [_sharded(optimizer, names, mesh) for optimizer in optimizers]


def _sharded(
    optimizer: torch.optim.Optimizer, names: dict[int, str], mesh: DeviceMesh
) -> torch.optim.Optimizer:
    assert not optimizer.state, "its state would be lost"
    groups, pairs = [], Pairs()
    for group in optimizer.param_groups:
        here = [
            (p, nn.Parameter(from_local_rows(local_rows(p.detach(), mesh), mesh, p)))
            for p in group["params"]
        ]
        in_order = [names[id(parameter)] for parameter, _ in here]
        groups.append({**group, "params": [own for _, own in here], "param_names": in_order})
        pairs += here
    rank, world_size = mesh.get_local_rank(), mesh.size()
    places = {
        own: (full, *row_range(len(full), rank=rank, world_size=world_size)) for full, own in pairs
    }

    def gradient(own: nn.Parameter) -> torch.Tensor | None:
        full, begin, count = places[own]
        return None if full.grad is None else full.grad.narrow(0, begin, count)

    exchanges = [_Exchange(bucket, mesh) for bucket in _buckets(pairs)]

    def exchange(*unused: Any) -> None:
        for each in exchanges:
            each()

    result = sharded(optimizer, groups, mesh, gradient)
    result.register_step_post_hook(exchange)
    return result


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


class _Exchange:
    """Sends the new rows of some weights to all ranks in one message; each rank's rows are padded to the longest."""

    def __init__(self, pairs: Pairs, mesh: DeviceMesh) -> None:
        self._group, self._world_size = mesh.get_group(), mesh.size()
        weights = [parameter.detach() for parameter, _ in pairs]  # and below, views of their memory
        self._weights = [weight.flatten() for weight in weights]
        self._rows = [local_rows(weight, mesh).flatten() for weight in weights]
        self._sizes = [_padded_rows(weight, self._world_size) for weight in weights]
        # (W, rows) of a weight that all ranks share evenly; others need a detour.
        self._shared = [
            weight.view(self._world_size, -1) if len(weight) == self._world_size * size else None
            for weight, size in zip(self._weights, self._sizes, strict=True)
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        padded = [
            rows if len(rows) == size else F.pad(rows, (0, size - len(rows)))
            for rows, size in zip(self._rows, self._sizes, strict=True)
        ]
        message = torch.cat(padded)
        gathered = message.new_empty(self._world_size, len(message))
        dist.all_gather_into_tensor(gathered.view(-1), message, group=self._group)
        received = [
            gathered.new_empty(self._world_size, size) if shared is None else shared
            for shared, size in zip(self._shared, self._sizes, strict=True)
        ]
        torch.split_with_sizes_copy(gathered, self._sizes, dim=1, out=received)
        for weight, shared, chunks in zip(self._weights, self._shared, received, strict=True):
            if shared is None:
                weight.copy_(chunks.flatten()[: len(weight)])


def _padded_rows(tensor: torch.Tensor, world_size: int) -> int:
    """Return how many numbers the largest share of a tensor's rows has."""
    return row_range(len(tensor), rank=0, world_size=world_size)[1] * tensor[0].numel()


def scatter_gradients(model: DistributedDataParallel, mesh: DeviceMesh) -> None:
    """Make each rank average only its rows of the gradients; the other rows stay its own and mean nothing."""
    # Unannotated: DDP takes only annotations that are no text.
    model.register_comm_hook(mesh, lambda mesh, bucket: _reduce_scatter(mesh, bucket))


def _reduce_scatter(mesh: DeviceMesh, bucket: Any) -> Future[torch.Tensor]:
    gradients, world_size = bucket.gradients(), mesh.size()
    message = torch._chunk_cat(gradients, 0, world_size)  # (W, padded rows of all)
    rows = message.new_empty(message.size(1))
    work = dist.reduce_scatter_tensor(rows, message.view(-1), group=mesh.get_group(), async_op=True)

    def put_back(summed: torch.Tensor) -> torch.Tensor:
        own = [local_rows(gradient, mesh).flatten() for gradient in gradients]
        sizes = [_padded_rows(gradient, world_size) for gradient in gradients]
        chunks = torch.split(summed / world_size, sizes)
        torch._foreach_copy_(own, [c[: len(o)] for c, o in zip(chunks, own, strict=True)])
        return bucket.buffer()

    if rows.is_cuda:
        # It runs on a stream of its own, where the future's tensor, unlike `rows`, is known to be in use.
        return work.get_future().then(lambda future: put_back(future.value()[0]))
    work.wait()  # gloo's work has no future
    done: Future[torch.Tensor] = Future()
    done.set_result(put_back(rows))
    return done


def clip_grad_norm(model: nn.Module, max_norm: float, mesh: DeviceMesh) -> torch.Tensor:
    """Scale the reduce-scattered gradients to at most `max_norm`; return their L2 norm before, ()."""
    return clip_rows(
        [local_rows(p.grad, mesh) for p in model.parameters() if p.grad is not None], max_norm
    )
