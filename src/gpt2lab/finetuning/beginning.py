"""What a fresh start of fine-tuning takes for granted, and which runs and weights are of that kind. No torch."""

from __future__ import annotations

from typing import Any

from gpt2lab.config.command_line import PROGRAMS, Command
from gpt2lab.config.schema import LENGTHS, Config, Recipe
from gpt2lab.config.settings import override
from gpt2lab.data.shards import TokenData, open_data
from gpt2lab.errors import ConfigError
from gpt2lab.finetuning.rows import open_instructions
from gpt2lab.model.counts import refuse_targets
from gpt2lab.tokenizers.chat_template import as_prompt

_ROWS, _ROWS_OF_SMALL = 16, 4  # a step; the small presets are for the CPU, and for little data
_SMALL = 20_000  # tokens a step of pretraining


def begin_tuning(command: Command, config: Config) -> Config:
    """Return the settings of a fresh start: what fine-tuning sets otherwise than pretraining, where nothing was typed.

    The rate is a tenth of the pretraining preset's, with adapters half of it: they begin at zero.

    Raises: ConfigError if it is not said what is tuned, or on what.
    """
    tuning, T = config.tuning, config.model.context_length
    if config.init.init_from is None:
        raise ConfigError(
            "--init_from is missing: the model to fine-tune, a run, a checkpoint, a Hugging Face folder or hf:NAME"
        )
    if tuning.instructions is None:
        raise ConfigError(
            "--instructions is missing: what to learn, a .jsonl file, hf:NAME or demo"
        )
    optim, typed = config.optim, command.typed
    if tuning.lora_r:
        refuse_targets(config.model, tuning)
        if optim.optimizer == "muon" and "optimizer" in typed:
            raise ConfigError(
                "--optimizer muon: is for the matrices of the blocks, which are frozen beside adapters; leave it out"
            )
    elif idle := sorted({"lora_alpha", "lora_targets"} & typed):
        raise ConfigError(f"--{idle[0]} goes with --lora_r N: without it all weights are trained")
    rows = _ROWS_OF_SMALL if config.batch.total_batch_size < _SMALL else _ROWS
    values: dict[str, Any] = {
        "shuffle": "windows",
        "max_lr": _part(optim.max_lr, 0.5 if tuning.lora_r else 0.1),
        "muon_lr": None if optim.muon_lr is None else _part(optim.muon_lr, 0.1),
        "optimizer": "adamw" if tuning.lora_r else optim.optimizer,
        "total_batch_size": rows * T,
        "mini_batch_size": min(rows, config.batch.mini_batch_size),
        "weight_decay": 0.0,
        "eval_freq": 50,
        "sample_freq": 50,
        "checkpoint_freq": 50,
        "keep_checkpoints": 3,
        "epoch_checkpoints": "off",
        "sample_prompt": as_prompt("Who are you?"),
    }
    if not typed & set(LENGTHS):
        values["num_epochs"] = 3.0
    return override(config, {name: v for name, v in values.items() if name not in typed})


def _part(rate: float, factor: float) -> float:
    return float(f"{rate * factor:.12g}")  # as people would write it


def open_what_is_learned(config: Config) -> TokenData:
    """Return the token shards of a run, or its conversations.

    Raises: DataError, ConfigError.
    """
    if config.tuning.instructions is not None:
        return open_instructions(config)
    return open_data(config.data.data_dir, vocab_size=config.model.vocab_size)


def recipe_of(config: Config) -> Recipe:
    """Return what kind of training settings belong to."""
    return "pretrain" if config.tuning.instructions is None else "finetune"


def refuse_other_recipe(command: Command, saved: Config, *, run: str) -> None:
    """Refuse to continue a run with another program than the one that began it.

    Raises: ConfigError.
    """
    recipe = recipe_of(saved)
    if recipe != command.recipe:
        raise ConfigError(
            f"run {run} was begun by {PROGRAMS[recipe]}; continue it with that, or name another with --run_name"
        )
