"""Bytes that a training step holds, in closed form: what `train_step` does today, candidate peak by candidate peak.

Counted on train_step with torch's MemTracker; tests/test_memory.py holds the formulas to 0.5 % of it. Whoever changes
what a step keeps alive changes the matching candidate here. No torch.

B sequences of T tokens, C channels, L blocks, H heads, V vocabulary rows, N parameters, A micro-batches a step.
There is no activation checkpointing and no sharding in the trainer, so there is none here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt2lab.config import ModelConfig
from gpt2lab.plan import count_matmul_parameters, count_parameters

Dtype = Literal["fp32", "bf16"]
PARTS = ("params", "optimizer", "gradients", "bf16_weights", "activations", "head")


@dataclass(frozen=True)
class Memory:
    """Tensor bytes at the peak of a step, by category, and when that is."""

    params: int
    optimizer: int
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
class _Sizes:
    """What the moments are made of."""

    N: int  # parameters
    L: int
    block: int  # bytes of activations that one block keeps for its backward
    tokens: int  # B*T
    residual: int  # elements, B*T*C
    scores: int  # elements, B*T*V
    matrix: int  # elements, C*C; a block has 12 of them
    vocab: int  # elements, V*C
    in_block: int  # parameters of one block
    ids: int  # bytes of the step's token ids
    kept: int  # bytes of gradients alive during the forward pass
    bf16: bool


def predict(
    model: ModelConfig, *, micro_batch: int, accumulation: int, dtype: Dtype, distributed: bool
) -> Memory:
    """Return the largest of the moments of a step at which memory can peak.

    Gradients live through the forward pass when micro-batches accumulate, and always under DDP, whose buckets they
    are views of.
    """
    C, tokens = model.n_embd, micro_batch * model.context_length
    N, bf16 = count_parameters(model), dtype == "bf16"
    # Saved by a block, bytes a channel of a token: two norms' inputs and outputs, qkv, attention, fc, gelu (bf16: 36).
    # Besides: attention's logsumexp a head, and mean and deviation of two norms.
    sizes = _Sizes(
        N=N,
        L=model.n_layer,
        block=tokens * ((36 if bf16 else 64) * C + 4 * model.n_head + 16),
        tokens=tokens,
        residual=tokens * C,
        scores=tokens * model.vocab_size,
        matrix=C * C,
        vocab=model.vocab_size * C,
        in_block=12 * C * C + 13 * C,
        ids=8 * tokens * accumulation,
        kept=4 * N if accumulation > 1 or distributed else 0,
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
    distributed: bool,
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
            distributed=distributed,
        ).tensors
        <= budget
    ]
    return max(fitting, default=None)


def _moment(
    at: str, s: _Sizes, *, gradients: int, copies: int, activations: int, head: int
) -> Memory:
    return Memory(4 * s.N, 8 * s.N, gradients, copies, activations, head, at)


def _around_the_loss(s: _Sizes, copies: int) -> list[Memory]:
    """The activations of all blocks are alive, and the head's: V wide, so that it often decides."""
    saved = (6 if s.bf16 else 8) * s.residual + 8 * s.tokens + s.ids  # last norm; targets; ids
    forward = (2 + 4 + 4 if s.bf16 else 4 + 4) * s.scores  # logits, fp32 copy, log-softmax
    backward = (4 + 4 + 4) * s.scores  # log-softmax, gradients of the loss and of the softmax
    if s.bf16:  # bf16 gradients of scores, weight and input; then the weight's in fp32
        head = max(2 * s.scores + 2 * s.vocab + 2 * s.residual, 4 * s.vocab)
    else:
        head = 4 * (s.scores + s.vocab + s.residual)
    return [
        _moment(
            at, s, gradients=s.kept, copies=copies, activations=s.L * s.block, head=saved + extra
        )
        for at, extra in (
            ("end of forward", forward),
            ("start of backward", backward),
            ("backward of the head", head),
        )
    ]


def _within_the_blocks(s: _Sizes) -> list[Memory]:
    """Backward of the last and of the first block: activations go as gradients come.

    The head's gradient waits for the embedding's, because the weight is shared.
    """
    moments = []
    for block in {s.L, 1}:
        above = 0 if s.kept else (s.L - block) * 4 * s.in_block
        own = 0 if s.kept else 4 * s.in_block
        if s.bf16:  # out of the MLP: bf16 gradients of gelu and weight, then the weight's in fp32
            first = max(14 * s.residual + 8 * s.matrix, 4 * s.residual + 16 * s.matrix)
            last = 16 * s.residual + 6 * s.matrix  # into qkv
        else:
            first = 20 * s.residual + 16 * s.matrix
            last = 24 * s.residual
        last += 12 * s.matrix if s.kept else 0  # else the weight's gradient counts as such
        for matrices, gradients, alive, work in (
            (block, above, block, first),
            (block - 1, above + own, block - 1, last),
        ):
            moments.append(
                _moment(
                    f"backward of block {block}",
                    s,
                    gradients=s.kept + gradients + 4 * s.vocab,
                    copies=24 * s.matrix * matrices if s.bf16 else 0,
                    activations=alive * s.block + work + s.ids,
                    head=0,
                )
            )
    return moments


def _at_the_end(s: _Sizes) -> list[Memory]:
    """The embedding's gradient, the head's and their sum; then the optimizer, fused, with all gradients."""
    gradients = (s.kept or 4 * (s.N - s.vocab)) + 12 * s.vocab
    return [
        _moment(
            "backward of the embedding", s, gradients=gradients, copies=0, activations=0, head=0
        ),
        _moment("optimizer step", s, gradients=4 * s.N, copies=0, activations=0, head=0),
    ]
