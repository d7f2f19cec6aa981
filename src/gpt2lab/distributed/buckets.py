"""Many weights in one message: the rows of each rank, flat and one after another.

Each rank's rows of a weight are padded to as many as the first rank has, which has the most, so all ranks send the same
number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpt2lab.config.derived import BUCKET_BYTES
from gpt2lab.distributed.sharding import from_local_rows, local_rows, row_range

Pairs = list[tuple[nn.Parameter, nn.Parameter]]  # a full weight here, and the same one sharded


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
        dist.all_gather_into_tensor(gathered.view(-1), rows, group=self._mesh.get_group())
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
