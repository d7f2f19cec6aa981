"""A run in numbers before it starts: batches, steps, parameters, disk; all in closed form. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt2lab import fmt
from gpt2lab.config.derived import BatchPlan, count_steps, plan_batches
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import options_of
from gpt2lab.model.counts import checkpoint_bytes, count_parameters, training_flops_per_token
from gpt2lab.optim.schedule import describe_rates


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
        """Target tokens of the full run."""
        return self.max_steps * self.batch.tokens

    @property
    def disk_bytes(self) -> int:
        """Largest disk use of the retained checkpoints."""
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


def _count_retained(config: Config, max_steps: int, full_epochs: int) -> int:
    """Bound the checkpoints on disk at once: rolling, epoch ends, best and its predecessor, the one being written."""
    every = config.checkpoint.checkpoint_freq
    rolling = math.ceil(max_steps / every) if every else 1
    ends = min(full_epochs, max_steps)  # of tiny data a step may end several
    if config.checkpoint.epoch_checkpoints == "off":
        ends = 0
    return min(rolling, config.checkpoint.keep_checkpoints) + ends + 2 + 1


def describe_plan(plan: Plan, config: Config) -> str:
    """Write the plan as lines of text."""
    model, optim = config.model, config.optim
    shape = f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
    shape += f"T {model.context_length}, V {model.vocab_size}"
    options = options_of(model)
    rows = [
        ("model", f"{model.model}: {shape}" + (f"; {options}" if options else "")),
        ("size", f"{plan.parameters:,} parameters, {plan.flops_per_token / 1e6:,.1f} MFLOP/token"),
        ("tokens/step", str(plan.batch)),
        ("steps", f"{plan.max_steps:,} ({plan.tokens:,} tokens, {plan.epochs:.3f} epochs)"),
        (
            "learning rate",
            f"{describe_rates(optim)}, {optim.lr_schedule}, warm-up {optim.warmup_steps} steps",
        ),
        (
            "checkpoints",
            f"{fmt.num_bytes(plan.checkpoint_bytes)} each, at most {plan.retained_checkpoints} at once "
            f"= {fmt.num_bytes(plan.disk_bytes)} of disk (interrupted starts may add emergency ones)",
        ),
    ]
    return "\n".join(f"{name:<14} {text}" for name, text in rows)
