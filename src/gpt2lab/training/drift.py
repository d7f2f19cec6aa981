"""Do all processes still hold the same weights? Replicas that once differ stay different, and no loss tells."""

from __future__ import annotations

import torch
from torch import nn

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.sharding import is_spread
from gpt2lab.errors import DriftError


def checksum(parameter: torch.Tensor) -> int:
    """Return the sum of a tensor's bits read as 32-bit integers, modulo 2**64: one flipped bit always changes it."""
    bits = parameter.detach().float().contiguous().view(torch.int32)
    return int(bits.sum(dtype=torch.int64))


def check_drift(model: nn.Module, runtime: Runtime, step: int) -> None:
    """Compare the checksum of every parameter of which each process has a copy; under fsdp there is none.

    Raises: DriftError on all of them, naming the first parameter and the processes that differ.
    """
    if not runtime.is_distributed:
        return
    copies = {name: p for name, p in model.named_parameters() if not is_spread(p)}
    everyone = runtime.gather([checksum(parameter) for parameter in copies.values()])
    for name, sums in zip(copies, zip(*everyone, strict=True), strict=True):
        if len(set(sums)) > 1:
            told = ", ".join(f"process {rank} {value:x}" for rank, value in enumerate(sums))
            raise DriftError(
                f"step {step}: processes hold different weights, first in {name} (checksums {told}): a memory or "
                f"communication fault; nothing was saved since, resume from the newest checkpoint on other hardware"
            )
