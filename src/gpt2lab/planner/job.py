"""What is to be trained, in the numbers that time, memory and cost depend on. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gpt2lab.config.schema import Config, Parallel, Recompute
from gpt2lab.config.settings import options_of
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import (
    count_adapters,
    count_parameters,
    flops_per_token,
    training_flops_per_token,
)
from gpt2lab.planner.memory import Dtype, Sharing
from gpt2lab.planner.progress import count_due, frequencies
from gpt2lab.planner.timing import work


@dataclass(frozen=True)
class Job:
    """A run: settings, length, and the number of processes that share a batch."""

    config: Config
    max_steps: int
    world: int
    dtype: Dtype
    compiled: bool
    unique_tokens: int | None = None  # of the training split, None if the data is not known
    dataset: tuple[tuple[str, float], ...] = ()  # how its size was given, for the report

    @property
    def sequences(self) -> int:
        """Sequences of one process in one step."""
        return self.config.batch.total_batch_size // self.config.model.context_length // self.world

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward pass."""
        return self.config.batch.mini_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.sequences // self.micro_batch

    @property
    def sharing(self) -> Sharing:
        """How processes share the run, and what is computed again."""
        return Sharing(self.world, self.parallel, self.recompute)

    @property
    def recompute(self) -> Recompute:
        """What blocks compute twice."""
        return self.config.system.activation_checkpointing

    @property
    def parallel(self) -> Parallel:
        """How the processes share what they hold."""
        return self.config.system.parallel if self.world > 1 else "ddp"

    @property
    def work(self) -> tuple[float, ...]:
        """One process's share of a step, in timing.KINDS."""
        model, tuning = self.config.model, self.config.tuning
        updaters = 1 if self.parallel == "ddp" else self.world
        whole = work(
            model,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            recompute=self.recompute,
            optimizer=self.config.optim.optimizer,
            updaters=updaters,
        )
        if not tuning.lora_r:
            return whole
        tokens = self.sequences * model.context_length
        spared = (flops_per_token(model) - self.flops_per_token) * tokens
        updated = count_adapters(model, tuning) / updaters
        return (whole[0] - spared, *whole[1:4], updated, whole[5])

    @property
    def is_gpt2(self) -> bool:
        """Tell whether it trains GPT-2 as it is known: blocks without options, AdamW."""
        return not options_of(self.config.model) and self.config.optim.optimizer == "adamw"

    @property
    def tokens(self) -> int:
        """Target tokens of the whole run."""
        return self.max_steps * self.config.batch.total_batch_size

    @property
    def epochs(self) -> float | None:
        """Passes over the data, None if its size is not known."""
        return self.tokens / self.unique_tokens if self.unique_tokens else None

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return count_parameters(self.config.model)

    @property
    def flops_per_token(self) -> int:
        """FLOPs to train on one token."""
        return training_flops_per_token(self.config)

    def with_steps(self, steps: int) -> Job:
        """Return the same job at another length."""
        return dataclasses.replace(self, max_steps=steps)

    def count(self, kind: str, done: int = 0) -> int:
        """Count the events of a kind after step `done`; a fresh run also evaluates before its first step."""
        freq = frequencies(self.config).get(kind)
        if freq is None:
            return 0
        due = count_due(done, freq, self.max_steps)
        if kind == "checkpoint":
            due = self._saves(done)
        return due + (1 if kind == "eval" and done == 0 else 0)

    def _saves(self, done: int) -> int:
        """Count steps that save: rolling ones, and evaluations, which save when they are the best so far."""
        every, evals = self.config.checkpoint.checkpoint_freq, self.config.eval.eval_freq
        steps = {self.max_steps} if done < self.max_steps else set()
        for freq in (every, evals):
            if freq and (self.max_steps - done) // freq <= 100_000:
                steps |= set(range((done // freq + 1) * freq, self.max_steps + 1, freq))
        return len(steps)


def cut_batch(config: Config, world: int, *, typed: bool) -> Config:
    """Return the settings with a mini batch that `world` processes can share, lowered only if nobody typed it.

    Raises: ConfigError if the batch cannot be cut.
    """
    batch, T = config.batch, config.model.context_length
    share, rest = divmod(batch.total_batch_size, T * world)
    if rest or share == 0:
        raise ConfigError(
            f"total_batch_size {batch.total_batch_size} is not a multiple of context_length x processes = "
            f"{T} x {world}; nearest: {max(1, round(batch.total_batch_size / (T * world))) * T * world}"
        )
    size = batch.mini_batch_size
    if share % size:
        if typed:
            raise ConfigError(
                f"mini_batch_size {size} does not divide the {share} sequences of a process in a step; "
                f"try {max(n for n in range(1, min(size, share) + 1) if share % n == 0)}"
            )
        size = max(n for n in range(1, min(size, share) + 1) if share % n == 0)
    return dataclasses.replace(config, batch=dataclasses.replace(batch, mini_batch_size=size))
