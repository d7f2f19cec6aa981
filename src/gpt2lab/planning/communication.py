"""What gradients cost on the way between GPUs: DDP's all-reduce, and how much of it backward hides. No torch.

t = 2 (n - 1) / n * bytes / busbw(bytes), as nccl-tests defines bus bandwidth (doc/PERFORMANCE.md). Buckets are reduced
while the last micro-batch's backward runs, except the one with the token embedding: its weight is also the head's, so
its gradient is complete only when backward ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt2lab.config import ModelConfig, Parallel
from gpt2lab.hardware import Link
from gpt2lab.plan import count_parameters

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
BACKWARD_SHARE = 2 / 3  # of forward plus backward
OVERLAP = 0.9  # of that, in which buckets can travel
SLOWDOWN = 0.03  # of the overlapped time: NCCL's kernels take multiprocessors from the model's


@dataclass(frozen=True)
class Exposed:
    """Seconds that the all-reduce adds to a step."""

    seconds: float
    all_reduce_seconds: float  # if nothing overlapped


def all_reduce_seconds(num_bytes: float, *, world: int, link: Link, message: float) -> float:
    """Return the time to all-reduce `num_bytes` in messages of `message` bytes."""
    return 2 * (world - 1) / world * num_bytes / link.rate(message)


def step_bytes(
    model: ModelConfig, *, parallel: Parallel, accumulation: int
) -> dict[Collective, int]:
    """Return the bytes of whole tensors that a step's collectives sum, gather and scatter.

    Of rows that all processes can share evenly; numbers like loss and norm aside. A process sends and receives
    `wire_share` of it.
    """
    gradients = 4 * count_parameters(model)
    blocks = 4 * model.n_layer * (12 * model.n_embd**2 + 13 * model.n_embd)
    if (
        parallel == "fsdp"
    ):  # of every micro-batch a block's weights for its forward and again for its backward
        gathered = gradients - blocks + accumulation * 2 * blocks
        return {"all_gather": gathered, "reduce_scatter": accumulation * gradients}
    if parallel == "zero1":
        return {"all_reduce": gradients, "all_gather": gradients}
    return {"all_reduce": gradients}


def wire_share(kind: Collective, *, world: int) -> float:
    """Return the part of a collective's bytes that a process sends: all but its own share, twice to sum everywhere."""
    return (2 if kind == "all_reduce" else 1) * (world - 1) / world


def exposed(
    model: ModelConfig, *, world: int, link: Link | None, micro_batch_seconds: float
) -> Exposed:
    """Return what remains visible of one step's all-reduce of fp32 gradients; nothing on one process."""
    if world == 1 or link is None:
        return Exposed(0.0, 0.0)
    embedding = 4.0 * model.vocab_size * model.n_embd
    rest = 4.0 * count_parameters(model) - embedding
    last = all_reduce_seconds(embedding, world=world, link=link, message=embedding)
    hidden = all_reduce_seconds(rest, world=world, link=link, message=min(rest, BUCKET_BYTES))
    window = OVERLAP * BACKWARD_SHARE * micro_batch_seconds
    seconds = max(0.0, hidden - window) + last + SLOWDOWN * min(hidden, window)
    return Exposed(seconds, hidden + last)
