"""What a run will do and need, in closed form: parameters, FLOPs, batches, steps, bytes.

The dry run, the estimator, the MFU column and the trainer call these same functions. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt2lab import fmt
from gpt2lab.config.schema import BatchConfig, Config, LengthConfig, ModelConfig
from gpt2lab.config.settings import options_of
from gpt2lab.errors import ConfigError
from gpt2lab.model.adapters import count_adapters

CPU_COMPILE_FROM_STEPS = 200  # `--compile auto` on a CPU: below, compiling costs more than it saves


def count_parameters(model: ModelConfig) -> int:
    """Count trainable parameters.

    Equals 124,439,808 / 354,823,168 / 774,030,080 / 1,557,611,200 for the four GPT-2 sizes at V = 50257, T = 1024.
    """
    V, T, C, L = model.vocab_size, model.context_length, model.n_embd, model.n_layer
    positions = T * C if model.positions == "learned" else 0
    return V * C + positions + L * count_block_parameters(model) + _count_norm_parameters(model)


def count_block_parameters(model: ModelConfig) -> int:
    """Count the parameters of one block: matrices, their biases, norms."""
    C = model.n_embd
    heads = 0 if model.qk_norm == "none" else 2 * C // model.n_head
    return 12 * C * C + 9 * C + 2 * _count_norm_parameters(model) + heads


def _count_norm_parameters(model: ModelConfig) -> int:
    """Count a norm's gain and bias, or gain alone."""
    return 2 * model.n_embd if model.norm == "layernorm" else model.n_embd


def count_matmul_parameters(model: ModelConfig) -> int:
    """Count the weights that take part in a matrix product per token: all matrices and the head, no look-ups."""
    return 12 * model.n_layer * model.n_embd**2 + model.vocab_size * model.n_embd


def flops_per_token(model: ModelConfig) -> int:
    """Count floating-point operations to train on one token: 6 N_matmul + 12 L C T.

    Forward and backward; attention as the full T x T score matrix, no causal discount; look-ups, norms and softmax
    are not counted. Source: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B.
    """
    attention = 12 * model.n_layer * model.n_embd * model.context_length
    return 6 * count_matmul_parameters(model) + attention


def training_flops_per_token(config: Config) -> int:
    """Count them for a run, with adapters or without."""
    return tuning_flops_per_token(config) if config.tuning.lora_r else flops_per_token(config.model)


def tuning_flops_per_token(config: Config) -> int:
    """Count them where adapters are trained: frozen matrices need no gradient, 4 N_matmul + 6 N_adapters + 12 L C T."""
    spared = 2 * count_matmul_parameters(config.model)
    return flops_per_token(config.model) - spared + 6 * count_adapters(config.model, config.tuning)


def checkpoint_bytes(config: Config) -> int:
    """Return the tensor bytes of one checkpoint: weights and the optimizer's state, fp32.

    AdamW keeps two moments of a weight, Muon one of each in a block's matrix; with adapters, theirs alone. The files
    are larger by their headers and state, about 200 bytes a tensor and 10 kB a process.
    """
    model = config.model
    if config.tuning.lora_r:
        return 4 * count_parameters(model) + 12 * count_adapters(model, config.tuning)
    in_blocks = 12 * model.n_layer * model.n_embd**2 if config.optim.optimizer == "muon" else 0
    return 12 * count_parameters(model) - 4 * in_blocks


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut: samples = world_size * accumulation * mini_batch_size."""

    samples: int
    mini_batch_size: int
    accumulation: int
    world_size: int
    context_length: int

    @property
    def tokens(self) -> int:
        """Target tokens of one optimizer step."""
        return self.samples * self.context_length

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} = B {self.mini_batch_size} x T {self.context_length} "
            f"x accumulation {self.accumulation} x world {self.world_size}"
        )


def plan_batches(batch: BatchConfig, *, context_length: int, world_size: int) -> BatchPlan:
    """Derive gradient accumulation from the total batch size.

    Raises: ConfigError naming the nearest total batch sizes that divide.
    """
    unit = batch.mini_batch_size * context_length * world_size
    accumulation, rest = divmod(batch.total_batch_size, unit)
    if rest:
        nearest = (
            f"{accumulation * unit} or {(accumulation + 1) * unit}" if accumulation else f"{unit}"
        )
        raise ConfigError(
            f"total_batch_size {batch.total_batch_size} is not a multiple of mini_batch_size x context_length x world "
            f"= {batch.mini_batch_size} x {context_length} x {world_size} = {unit}; nearest: {nearest}"
            f" (or another --mini_batch_size)"
        )
    samples = batch.total_batch_size // context_length
    return BatchPlan(samples, batch.mini_batch_size, accumulation, world_size, context_length)


def count_steps(
    length: LengthConfig, batch: BatchConfig, *, context_length: int, windows_per_epoch: int
) -> int:
    """Return max_steps, from whichever of steps, tokens and epochs was given.

    Raises: ConfigError if that is less than one step.
    """
    samples = batch.total_batch_size // context_length
    if length.max_steps is not None:
        return length.max_steps
    if length.max_tokens is not None:
        steps, given = (
            length.max_tokens // batch.total_batch_size,
            f"max_tokens {length.max_tokens}",
        )
    else:
        epochs = 1.0 if length.num_epochs is None else length.num_epochs
        steps = math.floor(epochs * windows_per_epoch / samples)
        given = f"num_epochs {epochs:g} of {windows_per_epoch} windows"
    if steps < 1:
        raise ConfigError(
            f"{given} is less than one step of {batch.total_batch_size} tokens; "
            f"lower --total_batch_size or train longer"
        )
    return steps


@dataclass(frozen=True)
class Plan:
    """A run before it starts: all derived numbers."""

    batch: BatchPlan
    max_steps: int
    epochs: float
    parameters: int
    flops_per_token: int
    checkpoint_bytes: int
    retained_checkpoints: int

    @property
    def tokens(self) -> int:
        """Target tokens of the whole run."""
        return self.max_steps * self.batch.tokens

    @property
    def disk_bytes(self) -> int:
        """Largest disk use of the retention plan."""
        return self.checkpoint_bytes * self.retained_checkpoints


def make_plan(config: Config, *, world_size: int, windows_per_epoch: int) -> Plan:
    """Derive every number of a run.

    Raises: ConfigError if the batch does not divide or the run has no step.
    """
    T = config.model.context_length
    batch = plan_batches(config.batch, context_length=T, world_size=world_size)
    max_steps = count_steps(
        config.length, config.batch, context_length=T, windows_per_epoch=windows_per_epoch
    )
    epochs = max_steps * batch.samples / windows_per_epoch
    return Plan(
        batch=batch,
        max_steps=max_steps,
        epochs=epochs,
        parameters=count_parameters(config.model),
        flops_per_token=training_flops_per_token(config),
        checkpoint_bytes=checkpoint_bytes(config),
        retained_checkpoints=_count_retained(config, max_steps, math.floor(epochs)),
    )


def _count_retained(config: Config, max_steps: int, whole_epochs: int) -> int:
    """Bound the checkpoints on disk at once: rolling, epoch ends, best and its predecessor, the one being written."""
    every = config.checkpoint.checkpoint_freq
    rolling = math.ceil(max_steps / every) if every else 1
    ends = min(whole_epochs, max_steps)  # of tiny data a step may end several
    if config.checkpoint.epoch_checkpoints == "off":
        ends = 0
    return min(rolling, config.checkpoint.keep_checkpoints) + ends + 2 + 1


def describe(plan: Plan, config: Config) -> str:
    """Write the plan for people."""
    model = config.model
    shape = f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
    shape += f"T {model.context_length}, V {model.vocab_size}"
    options = options_of(model)
    rows = [
        ("model", f"{model.model}: {shape}" + (f"; {options}" if options else "")),
        (
            "size",
            f"{plan.parameters:,} parameters, {plan.flops_per_token / 1e6:,.1f} MFLOP/token",
        ),
        ("tokens/step", str(plan.batch)),
        ("steps", f"{plan.max_steps:,} ({plan.tokens:,} tokens, {plan.epochs:.3f} epochs)"),
        (
            "learning rate",
            f"{config.optim.optimizer}, {config.optim.max_lr:g} -> {config.optim.min_lr:g}, "
            f"{config.optim.lr_schedule}, "
            f"warm-up {config.optim.warmup_steps} steps",
        ),
        (
            "checkpoints",
            f"{fmt.num_bytes(plan.checkpoint_bytes)} each, at most {plan.retained_checkpoints} at once "
            f"= {fmt.num_bytes(plan.disk_bytes)} of disk (interrupted starts may add emergency ones)",
        ),
    ]
    return "\n".join(f"{name:<14} {text}" for name, text in rows)
