"""Numbers that follow from settings alone: how a batch is divided, how many steps a run has, what is due after one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from gpt2lab.config.schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    LengthConfig,
    Parallel,
    SystemConfig,
)
from gpt2lab.errors import ConfigError

MANY_EPOCHS = 4  # above, repeated tokens teach little (Muennighoff et al. 2023, arXiv:2305.16264)
CPU_COMPILE_FROM_STEPS = 200  # `--compile auto` on a CPU: below, compiling costs more than it saves
# One graph of all layers compiles for a time that grows with them. From here a step is compiled in regions, those of
# the blocks once for all: a few more bytes are moved (docs/gpu_results.md), and the first step takes seconds.
REGIONS_FROM_LAYERS = 24
# What to do about a step that needs too much memory.
SMALLER_MINI_BATCH = (
    "A lower --mini_batch_size needs less and changes no loss; "
    "--mini_batch_size auto finds one that fits"
)
BUCKET_BYTES = int(SystemConfig.ddp_bucket_mb * 2**20)  # one message of ddp or zero1, by default


def compiles(system: SystemConfig, *, on_gpu: bool, max_steps: int) -> bool:
    """Tell whether a run of `max_steps` optimizer steps uses torch.compile, where the machine can."""
    if system.compile == "auto":
        return on_gpu or max_steps >= CPU_COMPILE_FROM_STEPS
    return system.compile == "on"


def saves_in_background(checkpoint: CheckpointConfig, *, on_gpu: bool) -> bool:
    """Tell whether a thread writes checkpoints while training continues."""
    wanted = checkpoint.async_checkpoint
    return wanted == "on" or (wanted == "auto" and on_gpu)


def compiles_by_region(n_layer: int, parallel: Parallel) -> bool:
    """Tell whether a compiled step is compiled in regions: of a deep model, and under fsdp.

    FSDP gathers weights between blocks, and no graph can span these. Evaluations then run uncompiled.
    """
    return parallel == "fsdp" or n_layer >= REGIONS_FROM_LAYERS


def check_fsdp_param_dtype(system: SystemConfig) -> None:
    """Check that fsdp rounds no weight that the run computes with unrounded.

    Raises: ConfigError.
    """
    is_bf16 = system.fsdp_param_dtype == "bf16" and system.parallel == "fsdp"
    if is_bf16 and system.dtype in ("fp32", "fp16"):
        raise ConfigError(
            f"fsdp_param_dtype bf16 would round weights of a run that computes in {system.dtype}; "
            "use --dtype bf16, or --fsdp_param_dtype fp32"
        )


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut: samples = world_size * accumulation * micro_batch."""

    samples: int
    micro_batch: int  # sequences of one forward pass on a rank
    accumulation: int
    world_size: int
    context_length: int

    @property
    def tokens(self) -> int:
        """Positions of one optimizer step; chats and padding have fewer targets."""
        return self.samples * self.context_length

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} = B {self.micro_batch} x T {self.context_length} "
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


def mini_batch_sizes(sequences: int, *, at_most: int | None = None) -> list[int]:
    """Return the micro-batches that divide a rank's `sequences` of a step, ascending; the first is 1."""
    limit = sequences if at_most is None else min(sequences, at_most)
    return [size for size in range(1, limit + 1) if sequences % size == 0]


def fit_mini_batch(
    batch: BatchConfig, *, context_length: int, world_size: int
) -> tuple[BatchConfig, str | None]:
    """Return the batch with the largest micro-batch up to its own that divides a rank's share, and a note if lower.

    Tokens per step are unchanged. A batch that the ranks cannot share is returned as it is: `plan_batches` rejects it.
    """
    # Sequences of one rank.
    share, rest = divmod(batch.total_batch_size, context_length * world_size)
    if rest or not share or share % batch.mini_batch_size == 0:
        return batch, None
    fitting = mini_batch_sizes(share, at_most=batch.mini_batch_size)[-1]
    note = (
        f"mini_batch_size {batch.mini_batch_size} -> {fitting}: "
        f"{world_size} ranks share {share * world_size} sequences a step"
    )
    return dataclasses.replace(batch, mini_batch_size=fitting), note


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
        steps = length.max_tokens // batch.total_batch_size
        given = f"max_tokens {length.max_tokens}"
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


def fitting_rows(num_tokens: int) -> int:
    """Return the rows of the embedding for so many ids: the next multiple of 128."""
    return -(-num_tokens // 128) * 128


def fit_vocabulary(config: Config, num_tokens: int | None, *, is_typed: bool) -> Config:
    """Return the settings for a tokenizer of so many ids: its rows are the next multiple of 128, unless they are typed.

    None: the tokenizer is not known, and all rows count as ids.
    """
    model = config.model
    if num_tokens is None:
        num_tokens = model.vocab_size
    elif not is_typed:
        model = dataclasses.replace(model, vocab_size=fitting_rows(num_tokens))
    return dataclasses.replace(config, model=dataclasses.replace(model, num_tokens=num_tokens))


def is_due(step: int, freq: int, last: int) -> bool:
    """Tell whether something with frequency `freq` happens after update `step` of `last`; always after the last."""
    return step == last or (freq > 0 and step % freq == 0)


def count_due(step: int, freq: int, last: int) -> int:
    """Count how often it still happens after `step`, the last step included."""
    if step >= last:
        return 0
    regular = (last // freq - step // freq) if freq > 0 else 0
    return regular + (0 if freq > 0 and last % freq == 0 else 1)


def count_saves(step: int, checkpoint_freq: int, eval_freq: int, last: int) -> int:
    """Count the steps after `step` that may save: rolling checkpoints, and evaluations, which save the best so far."""
    freqs = (checkpoint_freq, eval_freq, math.lcm(checkpoint_freq, eval_freq))
    rolling, best, both = (count_due(step, freq, last) for freq in freqs)
    return rolling + best - both


def frequencies(config: Config) -> dict[str, int]:
    """Return the steps between events of each kind, in the order of those of one step; 0 = only after the last."""
    freqs = {"eval": config.eval.eval_freq}
    if config.eval.hellaswag_path is not None:
        freqs["hellaswag"] = config.eval.hellaswag_freq
    if config.eval.core is not None:
        freqs["core"] = config.eval.core_freq
    return freqs | {
        "sample": config.eval.sample_freq,
        "checkpoint": config.checkpoint.checkpoint_freq,
    }
