"""Bytes that a training step holds, in closed form: each moment of `train_step` at which memory can peak. No torch.

Counted on train_step with torch's MemTracker; tests/unit/planner/test_memory.py holds the formulas to 0.5 % of it. A
change of what a step keeps alive needs a change of the matching moment here. A step compiled for a GPU differs in the
head; published readings of nvidia-smi say by how much (tests/unit/planner/test_published_runs.py).

B sequences of T tokens, C channels, L blocks, H heads, V vocabulary rows, N parameters, A micro-batches a step,
W ranks. All ranks need the same, up to the rows that do not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt2lab.config.derived import BUCKET_BYTES
from gpt2lab.config.schema import Config, ModelConfig, OptimConfig, Parallel
from gpt2lab.model.counts import (
    count_adapters,
    count_block_matrices,
    count_block_parameters,
    count_matmul_parameters,
    count_parameters,
    count_rows,
)

Dtype = Literal["fp32", "bf16", "fp16"]
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


class _BlockBytes:
    """What a block keeps for its backward, and what it holds at moments of it; bytes per channel of a token.

    Counted on the uncompiled model on a CPU, where torch computes RMSNorm in several steps that each keep something;
    a GPU's single kernel should keep less.
    """

    def __init__(self, model: ModelConfig, *, bf16: bool, frozen: bool) -> None:
        """Count a block of this model; `frozen`: its weights have no gradient, adapters beside them do."""
        H, rms, wide = model.n_head, model.norm == "rmsnorm", 4 if bf16 else 8
        self.rms = rms
        # GPT-2: two norms' inputs and outputs, qkv, attention, fc, GELU.
        self.saved = 36 if bf16 else 64
        # Of all channels of a token: attention's logsumexp, mean and deviation of two norms.
        self.saved_per_token = 4 * H + 16
        # In all: when the gradients of queries, keys and values come; when that of their weight is there.
        self.attention, self.into_qkv = (26, 16) if bf16 else (44, 24)
        self.norm = 12  # in all, in a norm's backward
        self.last_norm = 6 if bf16 else 8  # input and output of the norm before the head
        self.last_norm_per_token = 8
        if model.positions != "learned" or model.qk_norm != "none":
            # Queries and keys beside qkv. Attention's result is laid out like them, so that joining heads is a copy.
            self.saved += wide + (0 if H == 1 else wide // 2)
            self.attention += wide
        if model.qk_norm != "none":
            # Queries and keys divided by their size, and the sizes; under autocast also what was divided, in fp32.
            self.saved += 16 if bf16 else 8
            self.attention += 16 if bf16 else 8
            self.saved_per_token += 8 * H
        if rms:  # what is divided by its size, before the gain; and no mean
            self.saved += 8
            self.saved_per_token -= 8
            self.attention += 4
            self.into_qkv += 4
            self.norm, self.last_norm, self.last_norm_per_token = 24, self.last_norm + 4, 4
        if model.qk_norm == "gainless":
            self.saved -= 8
        if frozen:  # a gain without gradient needs no input of its own
            self.saved -= 8 * rms + 8 * (model.qk_norm == "rmsnorm")
            self.last_norm -= 4 * rms
        # Backward of ReLU squared, beyond `saved`: the incoming gradient, and the derivative in three steps. 0 for
        # GELU: the matrix product before it holds more.
        self.square = (28 if bf16 else 52) if model.activation == "relu2" else 0


class StepMemory:
    """The sizes that the moments of a step consist of, in bytes where nothing else is said."""

    def __init__(
        self,
        config: Config,
        *,
        micro_batch: int,
        accumulation: int,
        dtype: Dtype,
        world_size: int = 1,
        fused_head: bool = False,
    ) -> None:
        """Derive them from a run's settings; `fused_head`: without a log-softmax, as a step compiled for a GPU.

        Gradients live through the forward pass when micro-batches accumulate, and always under DDP, where they are
        views of its buckets. Fine-tuning adds masks. With adapters the optimizer holds state for them alone; the
        formula does not count what adapters compute on the way.
        """
        model, system, tuning = config.model, config.system, config.tuning
        self.L, self.N, self.world_size = model.n_layer, count_parameters(model), world_size
        self.bf16, self.fused_head = dtype != "fp32", fused_head  # fp16 is as wide
        self.recomputes = system.activation_checkpointing != "none"
        parallel = system.parallel if world_size > 1 else "ddp"
        adapters = count_adapters(model, tuning) if tuning.lora_r else 0
        self.frozen = adapters > 0  # all but adapters
        self.gathers = parallel == "fsdp"  # weights are full only while they are needed
        # A block's matrices are gathered in bf16, so that autocast copies none; the rest of it counts as outside.
        self.gathers_bf16 = self.gathers and system.fsdp_param_dtype == "bf16"
        self.is_untied, self.is_capped = model.head == "untied", model.logit_cap > 0
        self._count_elements(model, micro_batch * model.context_length)
        self._count_activations(config, accumulation)
        self._count_state(model, config.optim, parallel, adapters)
        self._count_gradients(accumulation, adapters)

    def _count_elements(self, model: ModelConfig, tokens: int) -> None:
        """Count elements: of a residual stream; of the logits; of C x C, of which a block has 12; of V x C; of a block.

        And the bytes of a full block's weights, and of the copies that autocast makes of weights.
        """
        C = model.n_embd
        self.tokens, self.residual, self.scores = tokens, tokens * C, tokens * model.vocab_size
        self.matrix, self.vocab = C * C, model.vocab_size * C
        count = count_block_matrices if self.gathers_bf16 else count_block_parameters
        self.in_block = count(model)
        # The norm of the gradient holds a number for each row of a matrix, and in fp64 twice those and the vectors'.
        rows = (1 + self.is_untied) * model.vocab_size + 9 * model.n_layer * C
        rows += model.context_length * (model.positions == "learned")
        vectors = model.n_layer * (count_block_parameters(model) - 12 * C * C) + 2 * C
        vectors += 2 * C * (model.embedding_norm == "on")
        vectors += self.is_untied * model.vocab_size  # the bias of the head
        self.norms = 4 * rows + 16 * (rows + vectors)
        self.weights = (2 if self.gathers_bf16 else 4) * self.in_block
        copied = self.vocab if self.gathers_bf16 else count_matmul_parameters(model)
        self.copies = 2 * copied if self.bf16 else 0

    def _count_activations(self, config: Config, accumulation: int) -> None:
        """Count what a block's backward needs, what the block keeps until then, and the inputs of the step.

        A block keeps all, its input alone, or its matrix products and attention's logsumexp besides.
        """
        model, C, tokens = config.model, config.model.n_embd, self.tokens
        self.each = _BlockBytes(model, bf16=self.bf16, frozen=self.frozen)
        # With conversations each block keeps its own mask, a number for each pair of positions.
        mask = 0
        if config.tuning.instructions is not None:
            mask = (2 if self.bf16 else 4) * model.context_length
        self.block = tokens * (self.each.saved * C + self.each.saved_per_token + mask)
        products = tokens * ((20 if self.bf16 else 40) * C + 4 * model.n_head)
        self.kept_block = {
            "none": self.block,
            "block": 4 * tokens * C,
            "selective": 4 * tokens * C + products,
        }[config.system.activation_checkpointing]
        rotation = 4 * model.context_length * C // model.n_head
        # Of the step's token ids, and of RoPE's cosines and sines.
        self.ids = 8 * tokens * accumulation
        self.inputs = self.ids + rotation * (model.positions != "learned")
        if model.embedding_norm == "on":  # the embedding, and what a gain multiplies
            self.inputs += tokens * ((8 if self.each.rms and not self.frozen else 4) * C + 8)

    def _count_state(
        self, model: ModelConfig, optim: OptimConfig, parallel: Parallel, adapters: int
    ) -> None:
        """Count the weights and the optimizer's state that a rank holds, and what an update adds to them."""
        W, trained = self.world_size, adapters or self.N
        share = W if self.gathers else 1
        self.params = 4 * (self.N + adapters) // share  # that a rank always holds
        self.around = 4 * (self.N - self.L * self.in_block)  # weights outside the blocks
        self.shard = 4 * trained // share  # gradients that a rank holds after their reduction
        muon = 12 * self.matrix * self.L if optim.has_muon else 0  # weights with one moment
        rows = count_rows(model) if optim.optimizer == "normuon" else 0
        updaters = 1 if parallel == "ddp" else W
        moments = 8 + 4 * (optim.average_tail > 0)
        self.optimizer = (moments * trained - 4 * muon) // updaters + 4 * rows
        # Of Muon: four times the matrices of one shape, a third of all; sharded, a rank's share of them.
        self.rounds = 4 * 4 * muon // 3 // updaters
        embedding = 0 if adapters else 4 * self.vocab
        # New weights that zero1 sends at once: of one optimizer.
        at_most = min(4 * max(muon, trained - muon), max(embedding, BUCKET_BYTES))
        self.sent = at_most if parallel == "zero1" else 0

    def _count_gradients(self, accumulation: int, adapters: int) -> None:
        """Count the gradients that are alive during the forward pass, and fsdp's buffer of the micro-batch before."""
        W = self.world_size
        self.kept = self.shard if accumulation > 1 or (W > 1 and not self.gathers) else 0
        if self.gathers and accumulation > 1 and not adapters:
            # Gradients outside the blocks stay full until the last micro-batch.
            self.kept += self.around - self.around // W
        self.stale = 4 * self.in_block if accumulation > 1 else 0
        # The head's gradient in the backward pass: one that shares a weight waits for the embedding's, and both for
        # their sum; another is a gradient at once.
        self.of_head, self.of_both = 4 * self.vocab, 12 * self.vocab
        if self.is_untied:
            self.of_head, self.of_both = 0 if self.kept else 4 * self.vocab, 4 * self.vocab

    def peak(self) -> Memory:
        """Return the largest of the moments at which memory can peak."""
        moments = [*_around_the_loss(self), *_within_the_blocks(self), *_at_the_end(self)]
        return max(moments, key=lambda moment: moment.tensors)


def _moment(
    at: str,
    s: StepMemory,
    *,
    gathered: int = 0,
    rounds: int = 0,
    gradients: int,
    copies: int = 0,
    activations: int = 0,
    head: int = 0,
) -> Memory:
    """Return a moment; `gathered`: bytes of other ranks' weights, under fsdp."""
    params = s.params + (gathered if s.gathers else 0)
    gradients = s.shard if s.frozen else gradients
    return Memory(params, s.optimizer + rounds, gradients, copies, activations, head, at)


def _around_the_loss(s: StepMemory) -> list[Memory]:
    """Return the moments around the loss: all blocks' activations are alive, and the head's tensors are V wide."""
    saved = s.each.last_norm * s.residual + s.each.last_norm_per_token * s.tokens + s.inputs
    forward = (2 + 4 + 4 if s.bf16 else 4 + 4) * s.scores  # logits, fp32 copy, log-softmax
    backward = (4 + 4 + 4) * s.scores  # log-softmax, gradients of the loss and of the softmax
    if s.is_capped:  # the logits, their multiple, the root, in fp32; and then a power of the root
        forward, backward = (12 + 4 + 4) * s.scores, 16 * s.scores + backward
    if s.fused_head:  # logits, and their gradients: in bf16 over them, as counted and as an H200 showed (docs/cards)
        forward, backward = (2 if s.bf16 else 4) * s.scores, (4 + 4) * s.scores
        if s.bf16 and not s.is_capped:
            backward = 2 * s.scores
    weight = 0 if s.frozen else s.vocab
    if s.bf16:  # bf16 gradients of scores, weight and input; then the weight's in fp32
        head = max(2 * s.scores + 2 * weight + 2 * s.residual, 4 * weight)
    else:
        head = 4 * (s.scores + weight + s.residual)
    # Autocast keeps copies of trained weights until the forward pass ends; a block that is not recomputed keeps its
    # own until its backward.
    later = 2 * s.vocab if s.bf16 and s.recomputes else s.copies
    normed = later - 2 * s.vocab if s.bf16 else 0
    return [
        _moment(
            at,
            s,
            gathered=s.around + s.weights + s.stale,  # and the block that comes next
            gradients=s.kept + gradients,
            copies=alive,
            activations=s.L * s.kept_block,
            head=held,
        )
        for at, held, gradients, alive in (
            ("end of forward", saved + forward, 0, later if s.frozen else s.copies),
            ("start of backward", saved + backward, 0, later),
            ("backward of the head", saved + head, 0, later),
            ("backward of the last norm", s.each.norm * s.residual + s.inputs, s.of_head, normed),
        )
    ]


def _within_the_blocks(s: StepMemory) -> list[Memory]:
    """Return the moments of the last and of the first block's backward: it frees activations and makes gradients.

    Under fsdp a block's weights are full, the next block's arrive, the gradients of the block above leave, and both use
    a buffer.
    """
    moments, matrix = [], 0 if s.frozen else s.matrix  # a frozen matrix has no gradient
    for block in {s.L, max(1, s.L - 1), 1} if s.gathers else {s.L, 1}:
        done = (s.L - block) * 4 * s.in_block * s.shard // (4 * s.N)
        above = 0 if s.kept else done
        own = s.weights if s.gathers or not s.kept else 0  # in the dtype of the weights
        before_qkv = own - 3 * (2 if s.gathers_bf16 else 4) * matrix if own else 0
        if s.gathers_bf16:  # of the MLP's last matrix: gradients of input and weight
            first, copy = 14 * s.residual + 8 * matrix, 0
        elif s.bf16:  # of the MLP's last matrix: bf16 gradients of input and weight, then the weight's in fp32
            first = max(14 * s.residual + 8 * matrix, 4 * s.residual + 16 * matrix)
            copy = 6 * matrix  # of qkv's weight
        else:
            first, copy = 20 * s.residual + 16 * matrix, 0
        if s.frozen:  # the gradient through the adapter
            first += (8 if s.bf16 else 16) * s.residual
        if s.each.square:  # that weight's gradient is complete by then, and its bf16 copy gone
            more = (16 if own else 0) - (8 if s.bf16 else 0)
            first = max(first, s.each.square * s.residual + more * matrix)
        middle = s.each.attention * s.residual + s.each.saved_per_token * s.tokens + copy
        last = s.each.into_qkv * s.residual + copy
        last += 0 if own else 12 * matrix  # else the weight's gradient counts as a gradient
        last = max(last, s.each.norm * s.residual)
        buffers = (1 + (block > 1)) * s.weights + 2 * 4 * s.in_block * (block < s.L)
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
                    gathered=s.around + buffers + s.stale,
                    gradients=s.kept + gradients + s.of_head,
                    copies=24 * s.matrix * copied if s.bf16 and not s.gathers_bf16 else 0,
                    activations=activations + s.inputs,
                )
            )
    return moments


def _at_the_end(s: StepMemory) -> list[Memory]:
    """Return the moments of the embedding's gradient, beside the head's; and of the fused optimizer step."""
    gradients = (s.kept or s.shard - 4 * s.vocab * s.shard // (4 * s.N)) + s.of_both
    gathered, sent = s.around + s.weights, 2 * s.sent + s.sent // s.world_size
    return [
        _moment("backward of the embedding", s, gathered=gathered, gradients=gradients),
        _moment("norm of the gradient", s, gradients=s.shard, activations=s.ids, head=s.norms),
        _moment("optimizer step", s, rounds=s.rounds, gradients=s.shard),
        _moment("exchange of weights", s, gradients=s.shard, head=sent),
    ]
