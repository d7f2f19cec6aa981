"""A run in numbers before it starts: batches, steps, parameters, disk; all in closed form. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gpt2lab import fmt
from gpt2lab.config.derived import MANY_EPOCHS, BatchPlan, count_saves, count_steps, plan_batches
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
    keeps_epochs: bool  # a checkpoint at the end of each epoch
    suits_length: bool = False  # batch and rates are those for the length, not the preset's own

    @property
    def tokens(self) -> int:
        """Positions of the full run."""
        return self.max_steps * self.batch.tokens

    @property
    def disk_bytes(self) -> int:
        """Largest disk use of the retained checkpoints."""
        return self.checkpoint_bytes * self.retained_checkpoints

    @property
    def why_batch(self) -> str:
        """Return a note that the batch was chosen automatically, to put after it."""
        return "; batch and rates suit the run's length" if self.suits_length else ""

    def describe_disk(self) -> str:
        """Write what the retained checkpoints take."""
        each, total = fmt.num_bytes(self.checkpoint_bytes), fmt.num_bytes(self.disk_bytes)
        return f"{each} each, at most {self.retained_checkpoints} at once = {total} of disk"


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
    wanted = config.checkpoint.epoch_checkpoints
    keeps_epochs = wanted == "on" or (wanted == "auto" and epochs <= MANY_EPOCHS)
    # With tiny data, one step may end several epochs.
    ends = min(math.floor(epochs), max_steps) if keeps_epochs else 0
    freqs = (config.checkpoint.checkpoint_freq, config.eval.eval_freq)
    rolling = min(count_saves(0, *freqs, max_steps), config.checkpoint.keep_checkpoints)
    return Plan(
        batch=batch,
        max_steps=max_steps,
        epochs=epochs,
        parameters=count_parameters(config.model),
        flops_per_token=training_flops_per_token(config),
        checkpoint_bytes=checkpoint_bytes(config),
        retained_checkpoints=rolling + ends + 3,  # best, the one before, the one being written
        keeps_epochs=keeps_epochs,
    )


def find_repeats(passes: Mapping[str, float]) -> list[str]:
    """Return a warning for each source that a run reads too often; `passes`: over each by its name."""
    return [
        f"{epochs:.1f} passes over {name}: beyond about {MANY_EPOCHS}, repeated tokens teach little "
        f"(arXiv:2305.16264); train for --num_epochs {MANY_EPOCHS}, or prepare more text"
        for name, epochs in passes.items()
        if epochs > MANY_EPOCHS
    ]


def describe_plan(plan: Plan, config: Config, *, tokens: int, epochs: float) -> str:
    """Write the plan as lines of text; `tokens` and `epochs`: of the full run."""
    model, optim = config.model, config.optim
    shape = f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
    shape += f"T {model.context_length}, V {model.vocab_size}"
    options = options_of(model)
    rows = [
        ("model", f"{model.model}: {shape}" + (f"; {options}" if options else "")),
        ("size", f"{plan.parameters:,} parameters, {plan.flops_per_token / 1e6:,.1f} MFLOP/token"),
        ("tokens/step", str(plan.batch) + plan.why_batch),
        ("steps", f"{plan.max_steps:,} ({tokens:,} tokens, {epochs:.3f} epochs)"),
        (
            "learning rate",
            f"{describe_rates(optim)}, {optim.lr_schedule}, warm-up {optim.warmup_steps} steps",
        ),
        ("checkpoints", f"{plan.describe_disk()} (interrupted starts may add emergency ones)"),
    ]
    return "\n".join(f"{name:<14} {text}" for name, text in rows)
