"""What time, memory and cost of a run depend on, whether it starts or somebody only asks. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt2lab.config import derived
from gpt2lab.config.derived import (
    compiles_by_region,
    count_due,
    count_saves,
    frequencies,
    mini_batch_sizes,
)
from gpt2lab.config.schema import ActivationCheckpointing, Config, Parallel
from gpt2lab.config.settings import options_of, override
from gpt2lab.data.mixture import Mixture
from gpt2lab.data.order import Order
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import (
    count_adapters,
    count_parameters,
    flops_per_token,
    training_flops_per_token,
)
from gpt2lab.planner.memory import Dtype, Memory, StepMemory
from gpt2lab.planner.timing import work
from gpt2lab.tokenizers.gpt2 import GPT2


@dataclass(frozen=True)
class Job:
    """A run: settings, length, and the number of ranks that share a batch."""

    config: Config
    max_steps: int
    world_size: int
    dtype: Dtype
    compiled: bool
    unique_tokens: int | None = None  # of the training split, None if the data is not known
    dataset: Mapping[str, float] = field(default_factory=dict)  # how its size was given
    order: Order | Mixture | None = None  # of the data, where it is known
    data_fingerprint: str | None = None

    @property
    def sequences(self) -> int:
        """Sequences of one rank in one step."""
        T = self.config.model.context_length
        return self.config.batch.total_batch_size // T // self.world_size

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward pass."""
        return self.config.batch.mini_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.sequences // self.micro_batch

    @property
    def recompute(self) -> ActivationCheckpointing:
        """What blocks compute twice."""
        return self.config.system.activation_checkpointing

    @property
    def parallel(self) -> Parallel:
        """How the ranks share what they hold."""
        return self.config.system.parallel if self.world_size > 1 else "ddp"

    @property
    def compiles_by_region(self) -> bool:
        """Tell whether the step, if it is compiled, is compiled in regions."""
        return compiles_by_region(self.config.model.n_layer, self.parallel)

    @property
    def work(self) -> tuple[float, ...]:
        """One rank's share of a step, in timing.KINDS."""
        model, tuning = self.config.model, self.config.tuning
        updaters = 1 if self.parallel == "ddp" else self.world_size
        full = work(
            model,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            recompute=self.recompute,
            optimizer=self.config.optim.optimizer,
            newton_schulz=self.config.optim.newton_schulz,
            updaters=updaters,
        )
        if not tuning.lora_r:
            return full
        tokens = self.sequences * model.context_length
        spared = (flops_per_token(model) - self.flops_per_token) * tokens
        updated = count_adapters(model, tuning) / updaters
        return (full[0] - spared, *full[1:4], updated, *full[5:])

    @property
    def is_gpt2(self) -> bool:
        """Tell whether it trains GPT-2 as published: blocks without options, AdamW, its ids."""
        is_plain = not options_of(self.config.model) and not self.config.optim.has_muon
        return is_plain and self.config.model.id_limit == GPT2.size

    @property
    def tokens(self) -> int:
        """Positions of the full run."""
        return self.max_steps * self.config.batch.total_batch_size

    @property
    def epochs(self) -> float | None:
        """Passes over the data, None if its size is not known."""
        return self.tokens / self.unique_tokens if self.unique_tokens else None

    @property
    def tokens_by_source(self) -> list[tuple[int, int | None]]:
        """Trained and unique tokens of each source; None as `unique_tokens` is."""
        if not isinstance(self.order, Mixture):
            return [(self.tokens, self.unique_tokens)]
        T = self.config.model.context_length
        counts = self.order.counts_before(self.tokens // T).tolist()
        rows = zip(counts, self.order.orders, strict=True)
        return [(count * T, own.windows_per_epoch * T) for count, own in rows]

    @property
    def epochs_by_source(self) -> dict[str, float]:
        """Passes over each source of a mixture; {} of a single folder."""
        samples = self.tokens // self.config.model.context_length
        return self.order.epochs_before(samples) if isinstance(self.order, Mixture) else {}

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return count_parameters(self.config.model)

    @property
    def flops_per_token(self) -> int:
        """FLOPs to train on one token."""
        return training_flops_per_token(self.config)

    def memory(self, *, on_gpu: bool = False, micro_batch: int | None = None) -> Memory:
        """Return the tensor bytes of a rank at the peak of a step."""
        size = self.micro_batch if micro_batch is None else micro_batch
        return StepMemory(
            self.config,
            micro_batch=size,
            accumulation=max(1, self.sequences // size),
            dtype=self.dtype,
            world_size=self.world_size,
            fused_head=self.compiled and on_gpu,
        ).peak()

    def largest_micro_batch(self, budget: float, *, on_gpu: bool = False) -> int | None:
        """Return the largest micro-batch whose peak fits `budget` bytes, None if one sequence does not.

        Memory grows with the micro-batch at any fixed accumulation; going from some accumulation to none frees less
        than one more sequence costs, except for tiny models. So it tries every divisor, the largest first.
        """

        def fits(size: int) -> bool:
            return self.memory(on_gpu=on_gpu, micro_batch=size).tensors <= budget

        return next(filter(fits, reversed(mini_batch_sizes(self.sequences))), None)

    def with_steps(self, steps: int) -> Job:
        """Return the same job at another length."""
        return dataclasses.replace(self, max_steps=steps)

    def with_validation(self, tokens: int) -> Job:
        """Return the same job on data with so many validation tokens: no evaluation reads more."""
        return self.with_settings(val_tokens=min(tokens, self.config.eval.val_tokens))

    def with_micro_batch(self, size: int) -> Job:
        """Return the job with so many sequences in a forward pass."""
        return self.with_settings(mini_batch_size=size)

    def with_settings(self, **settings: Any) -> Job:
        """Return the job with other settings, by their flat names."""
        return dataclasses.replace(self, config=override(self.config, settings))

    def count(self, kind: str) -> int:
        """Count the events of a kind in a fresh run.

        It also evaluates before its first step, and after its last the mean of its weights.
        """
        if kind == "checkpoint":
            freqs = (self.config.checkpoint.checkpoint_freq, self.config.eval.eval_freq)
            return count_saves(0, *freqs, self.max_steps)
        freq = frequencies(self.config).get(kind)
        more = (1 + (self.config.optim.average_tail > 0)) if kind == "eval" else 0
        return 0 if freq is None else count_due(0, freq, self.max_steps) + more


def ranks_and_micro_batch(environment: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the world size and the micro-batch of a start, from the environment in its run.json or manifest."""
    world_size, size = environment.get("world_size"), environment.get("mini_batch_size")
    return (world_size, size) if world_size and size else None


def batch_as_json(batch: derived.BatchPlan) -> dict[str, int]:
    """Return how a step is divided, in the words of the settings."""
    parts = {"mini_batch_size": batch.micro_batch, "accumulation": batch.accumulation}
    return {"tokens_per_step": batch.tokens, **parts, "world_size": batch.world_size}


def fit_mini_batch(config: Config, world_size: int, *, typed: bool) -> Config:
    """Return the settings with a micro-batch that divides the share of each rank; a typed one is not lowered.

    Raises: ConfigError if the ranks cannot share the batch, or a typed micro-batch does not divide their share.
    """
    batch, T = config.batch, config.model.context_length
    share, rest = divmod(batch.total_batch_size, T * world_size)
    if rest or not share:
        nearest = max(1, round(batch.total_batch_size / (T * world_size))) * T * world_size
        raise ConfigError(
            f"total_batch_size {batch.total_batch_size} is not a multiple of context_length x world size = "
            f"{T} x {world_size}; nearest: {nearest}"
        )
    fitted, note = derived.fit_mini_batch(batch, context_length=T, world_size=world_size)
    if typed and note is not None:
        raise ConfigError(
            f"mini_batch_size {batch.mini_batch_size} does not divide the {share} sequences of a rank in a step; "
            f"try {fitted.mini_batch_size}"
        )
    return dataclasses.replace(config, batch=fitted)
