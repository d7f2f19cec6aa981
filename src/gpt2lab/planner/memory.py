"""Bytes that a training step holds, in closed form: what `train_step` does today, candidate peak by candidate peak.

Counted on train_step with torch's MemTracker; tests/test_memory.py holds the formulas to 0.5 % of it. Whoever changes
what a step keeps alive changes the matching candidate here. No torch.

B sequences of T tokens, C channels, L blocks, H heads, V vocabulary rows, N parameters, A micro-batches a step,
W processes. Of several processes all need the same, up to the rows that do not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt2lab.config.schema import ModelConfig, Optimizer, Parallel, Recompute, TuningConfig
from gpt2lab.model.counts import (
    count_adapters,
    count_block_parameters,
    count_matmul_parameters,
    count_parameters,
)
from gpt2lab.planner.block_bytes import BlockBytes, count_block_bytes

Dtype = Literal["fp32", "bf16"]
BUCKET_BYTES = 25 * 2**20  # of new weights that zero1 sends at once
PRETRAINING = TuningConfig()
PARTS = ("params", "optimizer", "gradients", "bf16_weights", "activations", "head")


@dataclass(frozen=True)
class Memory:
    """Tensor bytes at the peak of a step, by category, and when that is."""

    params: int
    optimizer: int  # its state, and what Muon's step works with
    gradients: int
    bf16_weights: int  # autocast's copies
    activations: int  # of the blocks, with the temporary tensors of the block at work
    head: int  # the last norm, logits, softmax and their gradients
    peak_at: str

    @property
    def tensors(self) -> int:
        """Sum of the categories: what torch.cuda.max_memory_allocated would show."""
        return sum(getattr(self, part) for part in PARTS)


@dataclass(frozen=True)
class Sharing:
    """How processes share a run, and what the backward pass computes again."""

    world: int = 1
    parallel: Parallel = "ddp"
    recompute: Recompute = "none"


@dataclass(frozen=True)
class _Sizes:
    """What the moments are made of."""

    N: int  # parameters
    L: int
    frozen: bool  # all but adapters
    params: int  # bytes of weights that a process always holds
    optimizer: int  # of its state
    rounds: int  # bytes that Muon's step works with
    shard: int  # bytes of gradients that a process holds after their reduction
    around: int  # bytes of weights outside the blocks
    gathers: bool  # fsdp: weights are whole only while they are needed
    recomputes: bool
    kept_block: int  # bytes of activations that a block keeps until its backward
    block: int  # bytes of activations that its backward needs
    each: BlockBytes
    tokens: int  # B*T
    residual: int  # elements, B*T*C
    scores: int  # elements, B*T*V
    matrix: int  # elements, C*C; a block has 12 of them
    vocab: int  # elements, V*C
    in_block: int  # parameters of one block
    inputs: int  # bytes of the step's token ids, and of the cosines and sines that turn queries and keys
    kept: int  # bytes of gradients alive during the forward pass
    sent: int  # bytes of new weights that zero1 sends at once
    world: int
    stale: int  # bytes of a buffer of fsdp's that is still there from the micro-batch before
    bf16: bool


def predict(
    model: ModelConfig,
    *,
    micro_batch: int,
    accumulation: int,
    dtype: Dtype,
    sharing: Sharing,
    optimizer: Optimizer,
    tuning: TuningConfig = PRETRAINING,
) -> Memory:
    """Return the largest of the moments of a step at which memory can peak.

    Gradients live through the forward pass when micro-batches accumulate, and always under DDP, whose buckets they
    are views of. Fine-tuning adds masks, and with adapters leaves theirs alone to the optimizer; what adapters compute
    on the way is not counted.
    """
    W, parallel = sharing.world, sharing.parallel if sharing.world > 1 else "ddp"
    C, tokens = model.n_embd, micro_batch * model.context_length
    N, bf16 = count_parameters(model), dtype == "bf16"
    adapters = count_adapters(model, tuning) if tuning.lora_r else 0
    each = count_block_bytes(model, bf16=bf16, frozen=adapters > 0)
    # In rows of conversations each block keeps its own mask, a number for each pair of positions.
    mask = (2 if bf16 else 4) * model.context_length if tuning.instructions is not None else 0
    block = tokens * (each.saved * C + each.saved_per_token + mask)
    # Recomputing keeps a block's input alone, or its matrix products and attention's logsumexp besides.
    products = tokens * ((20 if bf16 else 40) * C + 4 * model.n_head)
    kept_block = {"none": block, "block": 4 * tokens * C, "selective": 4 * tokens * C + products}
    in_block = count_block_parameters(model)
    muon = 12 * C * C * model.n_layer if optimizer == "muon" else 0  # weights with one moment
    rotation = 4 * model.context_length * C // model.n_head if model.positions == "rotary" else 0
    trained, share = adapters or N, W if parallel == "fsdp" else 1
    shard = 4 * trained // share
    embedding = 0 if adapters else 4 * model.vocab_size * C
    around = 4 * (N - model.n_layer * in_block)
    kept = shard if accumulation > 1 or (W > 1 and parallel != "fsdp") else 0
    if parallel == "fsdp" and accumulation > 1 and not adapters:
        # Those outside the blocks stay whole until the last micro-batch.
        kept += around - around // W
    sizes = _Sizes(
        N=N,
        L=model.n_layer,
        frozen=adapters > 0,
        params=4 * (N + adapters) // share,
        optimizer=(8 * trained - 4 * muon) // (1 if parallel == "ddp" else W),
        rounds=4 * 4 * muon // 3,  # four times the matrices of one shape, a third of all
        shard=shard,
        around=around,
        gathers=parallel == "fsdp",
        recomputes=sharing.recompute != "none",
        kept_block=kept_block[sharing.recompute],
        block=block,
        each=each,
        tokens=tokens,
        residual=tokens * C,
        scores=tokens * model.vocab_size,
        matrix=C * C,
        vocab=model.vocab_size * C,
        in_block=in_block,
        inputs=8 * tokens * accumulation + rotation,
        kept=kept,
        sent=min(4 * trained, max(embedding, BUCKET_BYTES)) if parallel == "zero1" else 0,
        world=W,
        stale=4 * in_block if accumulation > 1 else 0,
        bf16=bf16,
    )
    copies = 2 * count_matmul_parameters(model) if bf16 else 0
    moments = [*_around_the_loss(sizes, copies), *_within_the_blocks(sizes), *_at_the_end(sizes)]
    return max(moments, key=lambda moment: moment.tensors)


def largest_micro_batch(
    model: ModelConfig,
    *,
    sequences: int,
    budget: float,
    dtype: Dtype,
    sharing: Sharing,
    optimizer: Optimizer,
    tuning: TuningConfig = PRETRAINING,
) -> int | None:
    """Return the largest divisor of a process's `sequences` a step whose peak fits `budget` bytes, None if 1 does not.

    Memory grows with the micro-batch at any fixed accumulation; going from some accumulation to none frees less than
    one more sequence costs, except for tiny models, so all divisors are tried.
    """
    fitting = [
        size
        for size in range(1, sequences + 1)
        if sequences % size == 0
        and predict(
            model,
            micro_batch=size,
            accumulation=sequences // size,
            dtype=dtype,
            sharing=sharing,
            optimizer=optimizer,
            tuning=tuning,
        ).tensors
        <= budget
    ]
    return max(fitting, default=None)


def _moment(
    at: str,
    s: _Sizes,
    *,
    gathered: int = 0,
    rounds: int = 0,
    gradients: int,
    copies: int = 0,
    activations: int = 0,
    head: int = 0,
) -> Memory:
    """Return a moment; `gathered`: bytes of other processes' weights, under fsdp."""
    params = s.params + (gathered if s.gathers else 0)
    gradients = s.shard if s.frozen else gradients
    return Memory(params, s.optimizer + rounds, gradients, copies, activations, head, at)


def _around_the_loss(s: _Sizes, copies: int) -> list[Memory]:
    """What all blocks keep is alive, and what the head does: V wide, so that it often decides."""
    saved = s.each.last_norm * s.residual + s.each.last_norm_per_token * s.tokens + s.inputs
    forward = (2 + 4 + 4 if s.bf16 else 4 + 4) * s.scores  # logits, fp32 copy, log-softmax
    backward = (4 + 4 + 4) * s.scores  # log-softmax, gradients of the loss and of the softmax
    weight = 0 if s.frozen else s.vocab
    if s.bf16:  # bf16 gradients of scores, weight and input; then the weight's in fp32
        head = max(2 * s.scores + 2 * weight + 2 * s.residual, 4 * weight)
    else:
        head = 4 * (s.scores + weight + s.residual)
    # Autocast keeps copies of what is trained until the forward pass ends, a block that keeps them longer does so for
    # its backward.
    later = 2 * s.vocab if s.bf16 and s.recomputes else copies
    normed = later - 2 * s.vocab if s.bf16 else 0
    return [
        _moment(
            at,
            s,
            gathered=s.around + 4 * s.in_block + s.stale,  # and the block that comes next
            gradients=s.kept + gradients,
            copies=alive,
            activations=s.L * s.kept_block,
            head=held,
        )
        for at, held, gradients, alive in (
            ("end of forward", saved + forward, 0, later if s.frozen else copies),
            ("start of backward", saved + backward, 0, later),
            ("backward of the head", saved + head, 0, later),
            ("backward of the last norm", s.each.norm * s.residual + s.inputs, 4 * s.vocab, normed),
        )
    ]


def _within_the_blocks(s: _Sizes) -> list[Memory]:
    """Backward of the last and of the first block: activations go as gradients come.

    The head's gradient waits for the embedding's, because the weight is shared. Under fsdp a block's weights are whole,
    the next one's are on their way, the gradients of the one above are being sent, and a buffer waits for both.
    """
    moments, matrix = [], 0 if s.frozen else s.matrix  # a frozen matrix has no gradient
    for block in {s.L, max(1, s.L - 1), 1} if s.gathers else {s.L, 1}:
        done = (s.L - block) * 4 * s.in_block * s.shard // (4 * s.N)
        above = 0 if s.kept else done
        own = 4 * s.in_block if s.gathers or not s.kept else 0
        before_qkv = own - 12 * matrix if own else 0
        if s.bf16:  # of the MLP's last matrix: bf16 gradients of input and weight, then the weight's in fp32
            first = max(14 * s.residual + 8 * matrix, 4 * s.residual + 16 * matrix)
            copy = 6 * matrix  # of qkv's weight
        else:
            first, copy = 20 * s.residual + 16 * matrix, 0
        if s.frozen:  # the gradient that comes by the adapter
            first += (8 if s.bf16 else 16) * s.residual
        if s.each.square:  # that weight's gradient is whole by then, and its bf16 copy gone
            more = (16 if own else 0) - (8 if s.bf16 else 0)
            first = max(first, s.each.square * s.residual + more * matrix)
        middle = s.each.attention * s.residual + s.each.saved_per_token * s.tokens + copy
        last = s.each.into_qkv * s.residual + copy
        last += 0 if own else 12 * matrix  # else the weight's gradient counts as such
        last = max(last, s.each.norm * s.residual)
        buffers = 1 + (block > 1) + 2 * (block < s.L)
        for weights, gradients, activations in (
            (block, above, (block - 1) * s.kept_block + s.block + first),
            (block - 1, above + before_qkv, (block - 1) * s.kept_block + middle),
            (block - 1, above + own, (block - 1) * s.kept_block + last),
        ):
            copied = min(1, weights) if s.recomputes else weights
            moments.append(
                _moment(
                    f"backward of block {block}",
                    s,
                    gathered=s.around + 4 * s.in_block * buffers + s.stale,
                    gradients=s.kept + gradients + 4 * s.vocab,
                    copies=24 * s.matrix * copied if s.bf16 else 0,
                    activations=activations + s.inputs,
                )
            )
    return moments


def _at_the_end(s: _Sizes) -> list[Memory]:
    """The embedding's gradient, the head's and their sum; then the optimizer, fused, with all gradients."""
    gradients = (s.kept or s.shard - 4 * s.vocab * s.shard // (4 * s.N)) + 12 * s.vocab
    return [
        _moment(
            "backward of the embedding",
            s,
            gathered=s.around + 4 * s.in_block,
            gradients=gradients,
        ),
        _moment(
            "optimizer step",
            s,
            rounds=s.rounds,
            gradients=s.shard,
            head=2 * s.sent + s.sent // s.world,
        ),
    ]
