"""ZeRO stage 1: every rank holds a full replica of the weights, but optimizer state only for its own rows.

Rajbhandari et al. 2020, arXiv:1910.02054. Each rank updates its rows of every weight and sends them to the others. The
weights equal those of one unsharded optimizer; bit by bit where each weight fills a CPU's vectors. AdamW works on flat
buckets: the CPU starts a few operators for each 25 MiB of weights, however many weights these are.

DDP reduces gradients in buckets during the backward pass; it splits a compiled model's graph so that this holds there
too. Between GPUs each bucket is reduce-scattered: with the new weights, a step sends as much as DDP's all-reduce.
Between CPUs DDP's all-reduce stays: gloo's reduce-scatter is an all-reduce inside, which saves nothing, and any other
order of summation would change the bits from three ranks on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gpt2lab.distributed.sharding import (
    Bucket,
    Pairs,
    ShardedMuon,
    divide,
    from_local_rows,
    local_rows,
    padded_numbers,
    reduce_scatter_single,
    rows_of,
)
from gpt2lab.errors import ConfigError
from gpt2lab.optim.muon import Muon
from gpt2lab.optim.optimizers import AdamW


def shard_optimizer_state(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    mesh: DeviceMesh,
    *,
    gradients_stay: bool,
) -> list[torch.optim.Optimizer]:
    """Return optimizers of this rank's rows in place of fresh ones of full weights.

    Their groups keep the weights' names in `param_names`, as torch does for named parameters. `step` exchanges the
    rows; the caller clears the model's own gradients. `gradients_stay`: in the same memory, step after step.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [_sharded(optimizer, names, mesh, gradients_stay) for optimizer in optimizers]


def _sharded(
    optimizer: torch.optim.Optimizer, names: dict[int, str], mesh: DeviceMesh, gradients_stay: bool
) -> torch.optim.Optimizer:
    assert not optimizer.state, "its state would be lost"
    groups, pairs_of_groups = [], []
    for group in optimizer.param_groups:
        pairs = [
            (p, nn.Parameter(from_local_rows(local_rows(p.detach(), mesh), mesh, p)))
            for p in group["params"]
        ]
        in_order = [names[id(parameter)] for parameter, _ in pairs]
        groups.append({**group, "params": [own for _, own in pairs], "param_names": in_order})
        pairs_of_groups.append(pairs)
    if isinstance(optimizer, Muon):
        return _sharded_muon(groups, pairs_of_groups, mesh, optimizer.even_rows)
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ConfigError(f"parallel zero1: no sharded form of {type(optimizer).__name__}; use ddp")
    buckets = [
        [Bucket(pairs, mesh, gradients_stay=gradients_stay) for pairs in divide(each)]
        for each in pairs_of_groups
    ]
    return BucketAdamW(groups, buckets)


def _sharded_muon(
    groups: list[dict[str, Any]], pairs_of_groups: list[Pairs], mesh: DeviceMesh, even_rows: bool
) -> ShardedMuon:
    pairs = [pair for each in pairs_of_groups for pair in each]
    full = {own: parameter for parameter, own in pairs}
    buckets = [Bucket(each, mesh, gradients_stay=False) for each in divide(pairs)]

    def gradient(own: nn.Parameter) -> torch.Tensor | None:
        whole = full[own].grad
        return None if whole is None else local_rows(whole, mesh)

    def exchange(*unused: Any) -> None:
        for bucket in buckets:
            bucket.send(bucket.weights())

    result = ShardedMuon(groups, mesh, even_rows=even_rows, gradient=gradient)
    result.register_step_post_hook(exchange)
    return result


class BucketAdamW(AdamW):
    """torch's fused AdamW over flat buckets of rows; its state, by weight, is views of flat moments."""

    def __init__(self, groups: list[dict[str, Any]], buckets: list[list[Bucket]]) -> None:
        """`groups`: those of a fresh AdamW, with sharded weights; `buckets` of each group hold them in their order."""
        super().__init__(groups)
        self._buckets = buckets
        self._moments: dict[Bucket, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update this rank's rows of all weights, and send them to all ranks."""
        for group, buckets in zip(self.param_groups, self._buckets, strict=True):
            for bucket in buckets:
                weights = bucket.weights()
                self._update_bucket(bucket, weights, group)
                bucket.send(weights)

    def _update_bucket(self, bucket: Bucket, weights: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a bucket's rows (n,) in place. The copy of the gradient ends here: sending needs memory too."""
        if bucket not in self._moments:
            steps = torch.zeros(len(bucket.owned), dtype=torch.float32, device=weights.device)
            self._keep(bucket, torch.zeros_like(weights), torch.zeros_like(weights), steps)
        mean, square, steps = self._moments[bucket]
        self.update(group, [weights], [bucket.gradients()], [mean], [square], [steps[0]])
        steps[1:] = steps[:1]  # a count for each weight, as in a checkpoint

    def _keep(
        self, bucket: Bucket, mean: torch.Tensor, square: torch.Tensor, steps: torch.Tensor
    ) -> None:
        self._moments[bucket] = mean, square, steps
        views = zip(bucket.owned, steps, bucket.unpack(mean), bucket.unpack(square), strict=True)
        for own, step, first, second in views:
            self.state[own] |= {"step": step, "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state by weight, as `state_dict` gives it."""
        super().load_state_dict(state_dict)
        for bucket in [bucket for buckets in self._buckets for bucket in buckets]:
            states = [self.state.get(own, {}) for own in bucket.owned]
            if not any(states):  # every step so far was skipped
                self._moments.pop(bucket, None)
                continue
            steps = torch.stack([state["step"] for state in states])
            assert bool((steps == steps[0]).all()), "weights differ in their number of steps"
            means, squares = (
                bucket.pack([rows_of(state[key]) for state in states])
                for key in ("exp_avg", "exp_avg_sq")
            )
            self._keep(bucket, means, squares, steps)


def scatter_gradients(model: DistributedDataParallel, mesh: DeviceMesh) -> None:
    """Make each rank average only its rows of the gradients; the other rows stay its own and mean nothing."""
    # Unannotated: DDP takes only annotations that are no text.
    model.register_comm_hook(mesh, lambda mesh, bucket: _reduce_scatter(mesh, bucket))


def _reduce_scatter(mesh: DeviceMesh, bucket: Any) -> Future[torch.Tensor]:
    gradients, world_size = bucket.gradients(), mesh.size()
    message = torch._chunk_cat(gradients, 0, world_size)  # (W, padded rows of all)
    rows = message.new_empty(message.size(1))
    work = reduce_scatter_single(rows, message.view(-1), group=mesh.get_group(), async_op=True)

    def put_back(summed: torch.Tensor) -> torch.Tensor:
        own = [local_rows(gradient, mesh).flatten() for gradient in gradients]
        sizes = [padded_numbers(gradient, world_size) for gradient in gradients]
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
