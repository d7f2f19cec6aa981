"""What weights and gradients cost on the way between GPUs, and how much of it computing hides. No torch.

t = share * bytes / busbw(message), as nccl-tests defines bus bandwidth (doc/PERFORMANCE.md), measured for all-reduce
and taken for all. `step_bytes` are those that real steps send. What hides behind what is assumed, not measured on GPUs:

ddp: buckets of gradients travel while the last micro-batch's backward runs, except the one with the token embedding:
its weight is also the head's, so its gradient is complete only when backward ends.
zero1: the same, and then all new weights, behind nothing.
fsdp: a block's weights travel while the block before is at work, forward and backward, its gradients while the next one
is; nothing hides the first block's weights, nor the weights and gradients outside the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt2lab.config.schema import ModelConfig, Parallel
from gpt2lab.model.counts import count_block_parameters, count_parameters
from gpt2lab.planner.hardware import Link

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
BACKWARD_SHARE = 2 / 3  # of forward plus backward
OVERLAP = 0.9  # of that, in which buckets can travel
SLOWDOWN = 0.03  # of the overlapped time: NCCL's kernels take multiprocessors from the model's


@dataclass(frozen=True)
class Exposed:
    """Seconds that communication adds to a step."""

    seconds: float
    in_all: float  # if nothing overlapped


def collective_seconds(
    kind: Collective, num_bytes: float, *, world: int, link: Link, message: float
) -> float:
    """Return the time of a collective over `num_bytes` in messages of `message` bytes."""
    return wire_share(kind, world=world) * num_bytes / link.rate(message)


def step_bytes(
    model: ModelConfig, *, parallel: Parallel, accumulation: int
) -> dict[Collective, int]:
    """Return the bytes of whole tensors that a step's collectives sum, gather and scatter.

    Of rows that all processes can share evenly; numbers like loss and norm aside. A process sends and receives
    `wire_share` of it.
    """
    gradients = 4 * count_parameters(model)
    blocks = 4 * model.n_layer * count_block_parameters(model)
    if parallel == "fsdp":
        # Of every micro-batch a block's weights for its forward and again for its backward, and its gradients.
        around = gradients - blocks
        return {
            "all_gather": around + accumulation * 2 * blocks,
            "reduce_scatter": around + accumulation * blocks,
        }
    if parallel == "zero1":
        return {"all_reduce": gradients, "all_gather": gradients}
    return {"all_reduce": gradients}


def wire_share(kind: Collective, *, world: int) -> float:
    """Return the part of a collective's bytes that a process sends: all but its own share, twice to sum everywhere."""
    return (2 if kind == "all_reduce" else 1) * (world - 1) / world


def exposed(
    model: ModelConfig,
    *,
    parallel: Parallel,
    world: int,
    link: Link | None,
    accumulation: int,
    micro_batch_seconds: float,
) -> Exposed:
    """Return what remains visible of one step's communication; nothing on one process."""
    if world == 1 or link is None:
        return Exposed(0.0, 0.0)
    if parallel == "fsdp":
        return _exposed_of_fsdp(model, world, link, accumulation, micro_batch_seconds)
    embedding = 4.0 * model.vocab_size * model.n_embd
    rest = 4.0 * count_parameters(model) - embedding

    def seconds(kind: Collective, num_bytes: float, message: float) -> float:
        return collective_seconds(kind, num_bytes, world=world, link=link, message=message)

    bucket = min(rest, BUCKET_BYTES)
    last = seconds("all_reduce", embedding, embedding)
    hidden = seconds("all_reduce", rest, bucket)
    if parallel == "zero1":
        after = seconds("all_gather", embedding, embedding) + seconds("all_gather", rest, bucket)
    else:
        after = 0.0
    window = OVERLAP * BACKWARD_SHARE * micro_batch_seconds
    return Exposed(_visible(hidden, window) + last + after, hidden + last + after)


def _exposed_of_fsdp(
    model: ModelConfig, world: int, link: Link, accumulation: int, micro_batch_seconds: float
) -> Exposed:
    block, L = 4.0 * count_block_parameters(model), model.n_layer
    around = 4.0 * count_parameters(model) - L * block

    def seconds(kind: Collective, num_bytes: float) -> float:
        return collective_seconds(kind, num_bytes, world=world, link=link, message=num_bytes)

    gather, scatter = seconds("all_gather", block), seconds("reduce_scatter", block)
    window = OVERLAP * micro_batch_seconds
    forward = gather + _visible((L - 1) * gather, (1 - BACKWARD_SHARE) * window)
    backward = _visible(L * (gather + scatter), BACKWARD_SHARE * window)
    once = seconds("all_gather", around) + seconds("reduce_scatter", around)
    return Exposed(
        seconds=once + accumulation * (forward + backward),
        in_all=once + accumulation * L * (2 * gather + scatter),
    )


def _visible(hidden: float, window: float) -> float:
    """Return what is left of seconds that may hide behind `window` seconds of work, with what that work loses."""
    return max(0.0, hidden - window) + SLOWDOWN * min(hidden, window)
