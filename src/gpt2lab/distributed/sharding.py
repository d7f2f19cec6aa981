"""Tensors sharded over the ranks by rows: torch's DTensor with one placement, Shard(0); AdamW and Muon over them.

Rank r of W holds the r-th chunk of ceil(n / W) of the n rows, as torch.chunk divides them. DTensor's module takes
seconds to import, so it is imported where a tensor is sharded.

Weights and moments are DTensors, so that checkpoints are those of any mode. The optimizers compute the same updates on
this rank's plain rows: through DTensor, each operation on each weight costs the CPU microseconds, 18 ms a step for 148
weights.

A bucket sends the rows of many weights in one message. Each rank's rows of a weight are padded to as many as the first
rank has, which has the most, so all ranks send the same number of bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpt2lab.config.derived import BUCKET_BYTES
from gpt2lab.errors import ConfigError
from gpt2lab.optim.muon import Muon, orthogonalize
from gpt2lab.optim.optimizers import AdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# torch 2.13 renamed both, and warns of the older names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Pairs = list[tuple[nn.Parameter, nn.Parameter]]  # a full weight here, and the same one sharded
Gradient = Callable[[nn.Parameter], torch.Tensor | None]  # this rank's rows of a weight's gradient


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
    """Return this rank's rows of a sharded tensor, and all of another; the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


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


def divide(pairs: Pairs) -> list[Pairs]:
    """Group weights into messages: of at most BUCKET_BYTES, or of one larger weight."""
    buckets: list[Pairs] = [[]]
    room = BUCKET_BYTES
    for pair in pairs:
        if buckets[-1] and pair[0].nbytes > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(pair)
        room -= pair[0].nbytes
    return [bucket for bucket in buckets if bucket]


class Bucket:
    """This rank's rows of some weights in one flat tensor, (n,); each weight's are padded to those of the first rank.

    The lists of tensors are made once, because each new tensor costs the CPU microseconds.
    """

    def __init__(self, pairs: Pairs, mesh: DeviceMesh, *, gradients_stay: bool) -> None:
        self._mesh, self._gradients_stay = mesh, gradients_stay
        self._full = [parameter for parameter, _ in pairs]
        self.owned = [own for _, own in pairs]
        # What follows are views of the weights' memory.
        weights = [parameter.detach() for parameter in self._full]
        self._sizes = [padded_numbers(weight, mesh.size()) for weight in weights]
        self._rows = [local_rows(weight, mesh).flatten() for weight in weights]
        missing = [size - len(r) for size, r in zip(self._sizes, self._rows, strict=True)]
        self._padding = [weight.new_zeros(n) for weight, n in zip(weights, missing, strict=True)]
        self._packed = self._with_padding(self._rows)
        self._weights = [weight.flatten() for weight in weights]
        # (W, rows) of a weight that all ranks share evenly; others need a detour.
        self._shared = [
            weight.view(mesh.size(), -1) if len(weight) == mesh.size() * size else None
            for weight, size in zip(self._weights, self._sizes, strict=True)
        ]
        self._seen: list[torch.Tensor | None] = []
        self._gradient_rows: list[torch.Tensor] = []

    def _with_padding(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        padded = zip((r.flatten() for r in rows), self._padding, strict=True)
        return [tensor for pair in padded for tensor in pair if len(tensor)]

    def pack(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of this rank's rows of tensors of the weights' shapes, (n,)."""
        return torch.cat(self._with_padding(rows))

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return sharded tensors of the weights' shapes whose rows are views of `flat`, (n,)."""
        chunks = zip(torch.split(flat, self._sizes), self._rows, self._full, strict=True)
        return [
            from_local_rows(chunk[: len(r)].view(-1, *p.shape[1:]), self._mesh, p)
            for chunk, r, p in chunks
        ]

    def weights(self) -> torch.Tensor:
        """Return a copy of this rank's rows of the weights, (n,)."""
        return torch.cat(self._packed)

    def gradients(self) -> torch.Tensor:
        """Return a copy of this rank's rows of the gradients, (n,)."""
        found = [parameter.grad for parameter in self._full]
        if not self._seen or any(a is not b for a, b in zip(found, self._seen, strict=True)):
            whole = [gradient for gradient in found if gradient is not None]
            assert len(whole) == len(found), "a weight has no gradient"
            self._gradient_rows = self._with_padding([local_rows(g, self._mesh) for g in whole])
            self._seen = found
        packed = torch.cat(self._gradient_rows)
        if not self._gradients_stay:  # else the views would keep the gradients' memory
            self._seen, self._gradient_rows = [], []
        return packed

    def send(self, rows: torch.Tensor) -> None:
        """Put every rank's rows, (n,), into the weights of all, in one message."""
        world_size = self._mesh.size()
        gathered = rows.new_empty(world_size, len(rows))
        all_gather_single(gathered.view(-1), rows, group=self._mesh.get_group())
        received = [
            gathered.new_empty(world_size, size) if shared is None else shared
            for shared, size in zip(self._shared, self._sizes, strict=True)
        ]
        torch.split_with_sizes_copy(gathered, self._sizes, dim=1, out=received)
        for weight, shared, chunks in zip(self._weights, self._shared, received, strict=True):
            if shared is None:
                weight.copy_(chunks.flatten()[: len(weight)])


def padded_numbers(tensor: torch.Tensor, world_size: int) -> int:
    """Return how many numbers the largest share of a tensor's rows has."""
    return row_range(len(tensor), rank=0, world_size=world_size)[1] * tensor[0].numel()


def gradient_rows(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's rows of the gradient of a sharded weight."""
    return None if parameter.grad is None else rows_of(parameter.grad)


class ShardedAdamW(AdamW):
    """torch's fused AdamW over rows; bit by bit that of full weights where rows fill a CPU's vectors."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the rows of all weights that have a gradient."""
        for group in self.param_groups:
            rows, gradients, means, squares, steps = [], [], [], [], []
            for parameter in group["params"]:
                gradient = gradient_rows(parameter)
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                gradients.append(gradient)
                rows.append(rows_of(parameter))
                means.append(rows_of(state["exp_avg"]))
                squares.append(rows_of(state["exp_avg_sq"]))
                steps.append(state["step"])
            self.update(group, rows, gradients, means, squares, steps)


class ShardedMuon(Muon):
    """Muon over rows: one rank makes a matrix orthogonal; the others send it their rows, and it returns the update.

    The matrices travel once each way in all, 2/W of what gathering them on every rank would send. Momentum stays with
    the rows; NorMuon's averages, a number for each row, are whole on every rank. On a CPU the weights are bit by bit
    Muon's, on GPUs up to the order of sums in products of fewer matrices.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        mesh: DeviceMesh,
        *,
        even_rows: bool,
        gradient: Gradient = gradient_rows,
    ) -> None:
        """`groups`: those of a fresh Muon, with sharded weights."""
        super().__init__(groups, lr=groups[0]["lr"], even_rows=even_rows, gradient=gradient)
        self._mesh = mesh
        self._owners = _owners(self.param_groups, mesh.size())

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        return rows_of(tensor)

    def _all_rows(
        self, parameters: list[nn.Parameter], numbers: list[torch.Tensor]
    ) -> torch.Tensor:
        whole = numbers[0].new_zeros(len(parameters), len(parameters[0]))
        for of_parameter, own in zip(whole, numbers, strict=True):
            local_rows(of_parameter, self._mesh).copy_(own)
        dist.all_reduce(whole)  # one rank's number and zeros: no rounding
        return whole

    def _own_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return local_rows(numbers, self._mesh)

    def _orthogonal(
        self, parameters: list[nn.Parameter], rows: int, columns: int
    ) -> Sequence[torch.Tensor]:
        world_size, rank = self._mesh.size(), self._mesh.get_local_rank()
        ranks = range(world_size)
        device = self._mesh.device_type  # also of rows that are offloaded
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        parameters_of = [[p for p in parameters if self._owners[p] == r] for r in ranks]
        in_order = [parameter for owned in parameters_of for parameter in owned]

        def numbers(parameter: nn.Parameter, of: int) -> int:
            return columns * row_range(len(parameter), rank=of, world_size=world_size)[1]

        mine = parameters_of[rank]
        to_owners = [sum(numbers(p, rank) for p in owned) for owned in parameters_of]
        to_me = [sum(numbers(p, r) for p in mine) for r in ranks]

        def exchange(message: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
            result = message.new_empty(sum(received))
            dist.all_to_all_single(result, message, received, sent, group=self._mesh.get_group())
            return result

        message = torch.cat([self._direction(p).flatten() for p in in_order])
        message = exchange(message.to(device, dtype), to_me, to_owners)
        if mine:
            by_rank = torch.split(message, [numbers(p, r) for r in ranks for p in mine])
            stack = torch.cat(
                [chunk for i in range(len(mine)) for chunk in by_rank[i :: len(mine)]]
            )
            del message, by_rank  # a third of the memory at the peak
            how = self.param_groups[0]["newton_schulz"]
            updates = orthogonalize(stack.view(-1, rows, columns), how).flatten()
            by_matrix = torch.split(updates, [numbers(p, r) for p in mine for r in ranks])
            message = torch.cat([chunk for r in ranks for chunk in by_matrix[r::world_size]])
        message = exchange(message, to_owners, to_me).to(self._held(parameters[0]).device)
        chunks = torch.split(message, [numbers(p, rank) for p in in_order])
        found = {p: c.view(-1, columns) for p, c in zip(in_order, chunks, strict=True)}
        return [found[parameter] for parameter in parameters]


def _owners(groups: list[dict[str, Any]], world_size: int) -> dict[nn.Parameter, int]:
    """Return the rank that computes each weight's update: the costliest first, to the rank with the least to do."""
    costs = {}
    for group in groups:
        for parameter in group["params"]:
            sides = sorted((len(parameter) // group["parts"], parameter.size(1)))
            costs[parameter] = group["parts"] * sides[0] ** 2 * sides[1]
    loads, owners = [0] * world_size, {}
    for parameter in sorted(costs, key=costs.__getitem__, reverse=True):
        owners[parameter] = loads.index(min(loads))
        loads[owners[parameter]] += costs[parameter]
    return owners


def sharded(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> torch.optim.Optimizer:
    """Return the same optimizer, fresh and of sharded weights, over this rank's rows; ConfigError if none can be."""
    if isinstance(optimizer, Muon):
        return ShardedMuon(optimizer.param_groups, mesh, even_rows=optimizer.even_rows)
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ConfigError(f"parallel fsdp: no sharded form of {type(optimizer).__name__}; use ddp")
    return ShardedAdamW(optimizer.param_groups)
