"""The parts of a run that exist before anything of it is written: model, optimizers, data, and where it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpt2lab.checkpoint.state import TrainState
from gpt2lab.checkpoint.weights import load_initial
from gpt2lab.data.loader import Loader
from gpt2lab.data.order import Order
from gpt2lab.data.windows import WindowReader
from gpt2lab.distributed.compile_cache import use_cache_folder
from gpt2lab.distributed.runtime import Runtime, resolve_dtype, use_fast_fp32_matmul
from gpt2lab.distributed.strategy import Strategy, resolve_compile
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.validation import MeasuresLoss, Validation
from gpt2lab.model import attention_backend, rng
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from gpt2lab.training.facts import facts_of
from gpt2lab.training.receipt import Receipt, check_resume, load_state
from gpt2lab.training.start import Start


@dataclass(frozen=True)
class Sources:
    """Where a run's batches come from, and what its validation loss is measured on."""

    loader: Loader
    validation: Callable[[Strategy], MeasuresLoss]


@dataclass(frozen=True)
class Recipe:
    """What one kind of training makes itself; everything else of a run is the same for all kinds."""

    build_model: Callable[[Start, Runtime], GPT]  # with its first weights
    open_sources: Callable[[Start, Runtime], Sources]
    to_train: Callable[[GPT], nn.Module]  # ids and targets in, summed loss out


@dataclass(frozen=True)
class Parts:
    """What a run is made of before anything of it is written."""

    facts: dict[str, Any]
    model: GPT
    wrapped: nn.Module  # the same weights, distributed
    strategy: Strategy
    optimizers: list[torch.optim.Optimizer]
    sources: Sources
    state: TrainState
    receipt: Receipt | None  # of a resume


def fit_to_hardware(start: Start, runtime: Runtime) -> Start:
    """Choose the device and replace `auto` by what it decides, once, so that a resume keeps it."""
    system, steps = start.config.system, start.plan.max_steps
    runtime.use(system)
    dtype = resolve_dtype(system.dtype, runtime.device)
    if system.fsdp_offload and runtime.device.type != "cuda":
        raise ConfigError(
            "fsdp_offload: moves weights from a GPU to the CPU's memory, and this run has no GPU; leave it out"
        )
    if system.attention != "auto" and runtime.device.type != "cuda":
        raise ConfigError(
            f"attention {system.attention}: is a GPU's kernel, and this run has no GPU; use --attention auto"
        )
    compiles, note = resolve_compile(system.compile, device=runtime.device, max_steps=steps)
    if compiles:
        use_cache_folder()
    if compiles and dtype == "fp32" and runtime.device.type == "cpu":
        use_fast_fp32_matmul()  # uncompiled fp32 stays the plain reference
    system = dataclasses.replace(system, dtype=dtype, compile="on" if compiles else "off")
    config = dataclasses.replace(start.config, system=system)
    warnings = (*start.warnings, note) if note else start.warnings
    return dataclasses.replace(start, config=config, warnings=warnings)


def look_at_attention(start: Start, model: GPT, runtime: Runtime) -> Start:
    """Have a GPU compute attention once, with the kernel that is wanted, and note which one ran; a CPU has no choice.

    Raises: ConfigError on all processes, before the run has a folder.
    """
    if runtime.device.type != "cuda":
        return start
    config = start.config
    found = runtime.everywhere(
        lambda: attention_backend.choose(
            config.system.attention,
            model,
            micro_batch=config.batch.mini_batch_size,
            masked=config.tuning.instructions is not None,
            autocast=Strategy.of(runtime, config.system).autocast,
        )
    )
    return dataclasses.replace(start, attention=found)


def refuse_mixed_hardware(start: Start, runtime: Runtime) -> None:
    """Refuse processes that decided differently: they would train one model in two precisions."""
    system = start.config.system
    choices = runtime.gather((runtime.device.type, system.dtype, system.compile))
    for rank, choice in enumerate(choices):
        if choice != choices[0]:
            raise ConfigError(
                f"process {rank} would use {choice}, process 0 {choices[0]} (device, dtype, compile); "
                f"set --device, --dtype and --compile so that all can follow"
            )


def build_first(start: Start, runtime: Runtime) -> GPT:
    """Build the model with its first weights, before the run has a folder: their source may turn out to be damaged.

    Raises: CheckpointError on all processes.
    """
    config = start.config
    model = build_model(config.model, seed=config.data.seed, device=runtime.device)
    if start.initial is not None:
        load_initial(start.initial.target, model, runtime)
    return model


def open_shards(start: Start, runtime: Runtime) -> Sources:
    """Return the windows of the run's shards: those to train on, and those to validate on."""
    config = start.config
    orders = {
        split: Order(
            [shard.tokens for shard in start.data.splits[split]],
            context_length=config.model.context_length,
            shuffle=config.data.shuffle if split == "train" else "none",
            seed=config.data.seed,
        )
        for split in ("train", "val")
    }
    readers = {
        split: WindowReader(
            start.data.splits[split],
            context_length=config.model.context_length,
            id_limit=min(config.model.vocab_size, NUM_TOKENS),
            verify=runtime.local_rank == 0,  # once on each machine, which may have files of its own
        )
        for split in ("train", "val")
    }
    return Sources(
        loader=Loader(
            orders["train"],
            readers["train"],
            start.plan.batch,
            rank=runtime.rank,
            device=runtime.device,
        ),
        validation=lambda strategy: Validation(
            orders["val"],
            readers["val"],
            val_tokens=config.eval.val_tokens,
            batch_size=config.batch.mini_batch_size,
            is_gpt2=start.data.is_gpt2 and config.model.vocab_size >= NUM_TOKENS,
            strategy=strategy,
            runtime=runtime,
        ),
    )


PRETRAINING = Recipe(build_first, open_shards, to_train=lambda model: model)


def build_and_load(
    start: Start, runtime: Runtime, model: GPT, recipe: Recipe = PRETRAINING
) -> Parts:
    """Build the parts around the model, and on a resume load the checkpoint into them and prove that it is the run's.

    Raises: CheckpointError, DataError; nothing was written then.
    """
    facts = facts_of(start, runtime)
    rng.seed_everything(start.config.data.seed)
    strategy = Strategy.of(runtime, start.config.system)
    wrapped = strategy.prepare(model, recipe.to_train)
    optimizers = strategy.share_state(
        model, build_optimizers(model, start.config.optim, device=runtime.device)
    )
    sources = recipe.open_sources(start, runtime)
    state, receipt = TrainState(), None
    if start.checkpoint is not None:
        state = runtime.everywhere(lambda: load_state(start, model, optimizers, runtime))
        receipt = runtime.decided_by_first(
            lambda: check_resume(start, state, sources.loader, facts)
        )
    return Parts(facts, model, wrapped, strategy, optimizers, sources, state, receipt)
