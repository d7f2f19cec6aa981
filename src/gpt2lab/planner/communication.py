"""What sending weights and gradients between GPUs costs, and how much of it computing hides. No torch.

t = share * bytes / busbw(message), as nccl-tests defines bus bandwidth (doc/PERFORMANCE.md), measured for all-reduce
and used for all collectives. `step_bytes` counts what real steps send. The overlap is assumed, not measured on GPUs:

ddp: buckets of gradients travel during the last micro-batch's backward, except the one with the token embedding: the
head shares its weight, so that its gradient is complete only when backward ends.
zero1: the same, reduce-scattered; then all new weights, which nothing hides.
fsdp: a block's weights travel while the block before computes, forward and backward, its gradients while the next one
does; nothing hides the first block's weights, nor the weights and gradients outside the blocks.
"""

from __future__ import annotations

from typing import Literal

from gpt2lab.config.derived import BUCKET_BYTES
from gpt2lab.model.counts import count_block_matrices, count_block_parameters, count_parameters
from gpt2lab.planner.hardware import Link
from gpt2lab.planner.job import Job

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
BACKWARD_SHARE = 2 / 3  # of forward plus backward
OVERLAP = 0.9  # of that: in it buckets can travel
SLOWDOWN = 0.03  # of the overlapped time: NCCL's kernels take multiprocessors from the model's


def step_bytes(job: Job, *, on_gpu: bool = True) -> dict[Collective, int]:
    """Return the bytes of full tensors that a step's collectives sum, gather and scatter.

    It assumes rows that all ranks share evenly and leaves out scalars such as the loss, and what Muon exchanges. A rank
    sends and receives `wire_share` of these bytes.
    """
    gradients = 4 * count_parameters(job.config.model)
    if job.parallel == "fsdp":
        # Each micro-batch gathers a block's weights for forward and again for backward, and scatters its gradients.
        weights, blocks = (job.config.model.n_layer * size for size in _block_bytes(job))
        around = gradients - blocks
        return {
            "all_gather": around + job.accumulation * 2 * weights,
            "reduce_scatter": around + job.accumulation * blocks,
        }
    if job.parallel == "zero1":
        # gloo cannot reduce-scatter; see distributed/zero1.py.
        return {"reduce_scatter" if on_gpu else "all_reduce": gradients, "all_gather": gradients}
    return {"all_reduce": gradients}


def _block_bytes(job: Job) -> tuple[int, int]:
    """Return the bytes of what fsdp gathers for a block, and of the gradients that it scatters, fp32.

    In bf16 these are the block's matrices alone; the rest travels with what is outside the blocks.
    """
    if job.config.system.fsdp_param_dtype == "bf16":
        matrices = count_block_matrices(job.config.model)
        return 2 * matrices, 4 * matrices
    return (4 * count_block_parameters(job.config.model),) * 2


def wire_share(kind: Collective, *, world_size: int) -> float:
    """Return the share of a collective's bytes that a rank sends: all but its own, twice for an all-reduce."""
    return (2 if kind == "all_reduce" else 1) * (world_size - 1) / world_size


def exposed(job: Job, link: Link | None, micro_batch_seconds: float) -> tuple[float, float]:
    """Return the seconds that communication adds to a step, and those it would add if nothing hid it."""
    if job.world_size == 1 or link is None:
        return 0.0, 0.0
    model, accumulation = job.config.model, job.accumulation

    def seconds(kind: Collective, num_bytes: float, message: float) -> float:
        return wire_share(kind, world_size=job.world_size) * num_bytes / link.rate(message)

    window = OVERLAP * micro_batch_seconds
    if job.parallel == "fsdp":
        weights, gradients = _block_bytes(job)
        L = model.n_layer
        around = 4.0 * count_parameters(model) - L * gradients
        gather = seconds("all_gather", weights, weights)
        scatter = seconds("reduce_scatter", gradients, gradients)
        forward = gather + _visible((L - 1) * gather, (1 - BACKWARD_SHARE) * window)
        backward = _visible(L * (gather + scatter), BACKWARD_SHARE * window)
        once = seconds("all_gather", around, around) + seconds("reduce_scatter", around, around)
        return (
            once + accumulation * (forward + backward),
            once + accumulation * L * (2 * gather + scatter),
        )
    embedding = 4.0 * model.vocab_size * model.n_embd
    rest = 4.0 * count_parameters(model) - embedding
    bucket = min(rest, BUCKET_BYTES)
    reduction: Collective = "reduce_scatter" if job.parallel == "zero1" else "all_reduce"
    last = seconds(reduction, embedding, embedding)
    hidden = seconds(reduction, rest, bucket)
    after = 0.0
    if job.parallel == "zero1":
        after = seconds("all_gather", embedding, embedding) + seconds("all_gather", rest, bucket)
    return _visible(hidden, BACKWARD_SHARE * window) + last + after, hidden + last + after


def _visible(hidden: float, window: float) -> float:
    """Return the part of `hidden` seconds that `window` seconds of work cannot hide, plus what that work loses."""
    return max(0.0, hidden - window) + SLOWDOWN * min(hidden, window)
