"""The command line of the trainer: flags are the leaf names of Config, plus a few actions. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.commands import help_page
from gpt2lab.commands.branch import as_branch
from gpt2lab.commands.parser import fill, name_of, read_words, unknown_flag
from gpt2lab.config.flags import Flag, flags_of, option
from gpt2lab.config.other_programs import answer, answer_value
from gpt2lab.config.presets import PRESETS
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import LENGTHS, Config, RecipeName
from gpt2lab.config.settings import LEAVES, as_recorded, both_set_length, to_flat
from gpt2lab.config.settings_file import PROGRAMS, TUNING, check_recipe, make_request, read_file
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Actions:
    """What to do, as opposed to what the run is."""

    resume: str | None = option(
        None, "latest | auto (latest or fresh) | best | STEP | folder of a checkpoint"
    )
    branch_from: str | None = option(
        None,
        "RUN@STEP: begin a new run with the full state of a checkpoint, and leave the old run as it is",
    )
    cooldown: str | None = option(
        None,
        "with --branch_from a wsd run: let the rate fall to min_lr from there, over N steps, or tokens such as 100M",
    )
    gpus: str | None = option(
        None,
        "start so many ranks on this machine, each on its GPU (without one, on the CPU); auto: all GPUs",
    )
    list_checkpoints: bool = option(
        False, "list the checkpoints of all runs (or of --run_name) and exit"
    )
    verify: bool = option(
        False,
        "with --list_checkpoints: read every byte and compare its hash; exit code 1 if one is damaged",
    )
    dry_run: bool = option(False, "print what the run would do and need, and exit")
    preflight: bool = option(
        False,
        "check disk, memory, data, one small step and the network in up to a minute, print GO or NO-GO, and exit",
    )
    json: bool = option(
        False, "with --list_checkpoints, --dry_run or --preflight: one JSON object on stdout"
    )
    import_checkpoint: Path | None = option(
        None,
        "make a .pt file of nanoGPT or of the predecessor the first checkpoint of a run, and exit",
    )
    trust: bool = option(
        False, "with --import_checkpoint: read a file whose settings are pickled objects"
    )
    config: Path | None = option(
        None,
        "TOML or JSON file of settings, such as a run's config.json; what is typed counts above it, presets below",
    )
    save_config: Path | None = option(
        None, "write the settings of this command line to a new .toml or .json file, and exit"
    )
    preset: str | None = option(
        None,
        "GPUs to train on, such as 1x4090 or 8xh100, or auto: sets the micro-batch that fits them, unless typed, and "
        "prints the expected speed; tokens per step stay",
    )
    allow_change: str | None = option(
        None, "comma-separated settings that a resume may change; `data` for other data", adds=True
    )
    fit_schedule: bool = option(
        False,
        "with --max_hours: train as many steps as surely end in time, so that the decay completes",
    )
    stop_after_steps: int | None = option(
        None, "stop and save once N steps of the run are done; schedule untouched"
    )
    stop_at: str | None = option(
        None, "stop and save before this moment: HH:MM or 2026-11-21T18:30; schedule untouched"
    )
    pg_timeout_minutes: float = option(
        60.0, "timeout of the process group; --hang_seconds notices a hang earlier"
    )


@dataclass(frozen=True)
class _Flags:
    actions: Actions = field(default_factory=Actions)
    config: Config = field(default_factory=Config)


_AUTO = "auto"  # of --mini_batch_size: the setting itself is always a number
_FILES = ("config", "save_config")
_YEAR = 525_600  # minutes
_PRETRAINING = frozenset({"import_checkpoint", "trust", "fit_schedule"})
_SIZES = ("n_layer", "n_head", "n_embd", "context_length")
# Of the help of each recipe: its head, and the flags of its short page.
_ABOUT: dict[RecipeName, str] = {
    "pretrain": """Train a GPT on token shards, or continue a run.

gpt2lab train --model gpt2-nano --max_steps 200
gpt2lab train --run_name my_run --resume latest
gpt2lab train --gpus 4 --model gpt2
torchrun --nproc_per_node=4 -m gpt2lab.train --model gpt2""",
    "finetune": """Fine-tune a model on conversations.

gpt2lab finetune --init_from latest --instructions demo --run_name tuned
gpt2lab finetune --init_from hf:gpt2 --instructions pairs.jsonl --lora_r 8""",
}
_COMMON: dict[RecipeName, tuple[str, ...]] = {
    "pretrain": (
        *("model", "data_dir", "run_name", "resume", "config", "init_from", "dry_run"),
        *("gpus", "max_steps", "max_tokens", "num_epochs", "max_hours", "total_batch_size"),
        *("mini_batch_size", "max_lr", *_SIZES, "eval_freq", "checkpoint_freq"),
        *("use_tensorboard", "device", "checkpoint_dir"),
    ),
    "finetune": (
        *("init_from", "instructions", "run_name", "resume", "config", "dry_run", "gpus", "lora_r"),
        *("num_epochs", "max_steps", "max_lr", "mini_batch_size", "device", "checkpoint_dir"),
    ),
}
# Where the help of fine-tuning differs from that of training.
_TUNING_HELP = {
    "init_from": "the model to fine-tune: a run, a checkpoint, a Hugging Face folder, or hf:NAME",
    "num_epochs": "passes over the conversations",
    "mini_batch_size": "rows of conversations per forward pass on each rank",
}
# Where its defaults differ; the recipe has them.
TUNING_DEFAULTS = {
    "shuffle": "windows",
    "total_batch_size": "16 rows of the context, 4 for small models",
    "mini_batch_size": "16 at most, 4 for small models",
    "num_epochs": "3",
    "max_lr": "a tenth of the preset's, with adapters a half",
    "muon_lr": "a tenth of the preset's",
    "weight_decay": "0",
    **dict.fromkeys(("eval_freq", "sample_freq", "checkpoint_freq"), "50"),
    "keep_checkpoints": "3",
    "epoch_checkpoints": "off",
    "sample_prompt": "the question Who are you?",
}


@dataclass(frozen=True)
class TrainArguments:
    """A parsed command line of the trainer: what to do, and the run that it is done to."""

    actions: Actions
    request: RunRequest


def parse(argv: list[str], recipe: RecipeName = "pretrain") -> TrainArguments:
    """Parse the trainer's command line, or that of another recipe.

    Raises: ConfigError with one line; SystemExit(0) after printing help.
    """
    flags = _flags_of(recipe)
    if (how := help_page.asked(argv)) is not None:
        about = _ABOUT[recipe]
        name, everything = help_page.name_in(about), how == "long"
        print(help_page.page(name, flags, about, everything=everything, common=_COMMON[recipe]))
        raise SystemExit(0)
    given = read_words(flags, argv, unknown=_unknown, elsewhere=_elsewhere)
    if finds_mini_batch := given.get("mini_batch_size") == _AUTO:
        del given["mini_batch_size"]
    found = fill(_Flags, given)
    actions, flat = found.actions, to_flat(found.config)
    values = as_recorded({name: flat[name] for name in LEAVES if name in given})
    lengths = [f"--{name}" for name in LENGTHS if name in values]
    if len(lengths) > 1:
        raise ConfigError(both_set_length(lengths))
    _reject_idle_actions(actions)
    check_recipe(values, recipe)
    if recipe == "finetune" and finds_mini_batch:
        raise ConfigError(
            f"--mini_batch_size auto is for pretraining, {PROGRAMS['pretrain']}; leave it out here"
        )
    if actions.preflight and (finds_mini_batch or actions.fit_schedule):
        raise ConfigError(
            "--preflight tries one setting; give --mini_batch_size and the run's length as numbers"
        )
    if actions.preset in PRESETS:
        raise ConfigError(f"--preset {actions.preset}: here it is --model {actions.preset}")
    path = actions.config
    file: dict[str, Any] = {}
    if path is not None:
        file = read_file(paths.from_working_directory(path), recipe, typed=values)
    chosen = values.keys() | file.keys()
    left_open = {"mini_batch_size"} if finds_mini_batch else set()
    if actions.preset is not None and "mini_batch_size" not in chosen:
        left_open.add("mini_batch_size")
    if actions.fit_schedule:
        left_open.add("max_steps")
    request = make_request(
        values, file=file, recipe=recipe, resume=actions.resume, allow_change=actions.allow_change
    )
    request = replace(
        request,
        stop_after_steps=actions.stop_after_steps,
        stop_at=actions.stop_at,
        open_settings=frozenset(left_open),
        timeout_minutes=actions.pg_timeout_minutes,
    )
    return TrainArguments(actions, as_branch(request, actions.branch_from, actions.cooldown))


def action_words(words: Sequence[str]) -> list[str]:
    """Return the flags that a settings file cannot hold, such as --preset, with their values."""
    kept: list[str] = []
    keeps = False
    for word, after in itertools.zip_longest(words, words[1:]):
        if word.startswith("--"):
            name, value = name_of(word), word.partition("=")[2] or after
            is_auto = (name, value) == ("mini_batch_size", _AUTO)
            keeps = is_auto or (name in Actions.__dataclass_fields__ and name not in _FILES)
        kept += [word] if keeps else []
    return kept


def _flags_of(recipe: RecipeName) -> list[Flag]:
    """Return the flags of a recipe, with its own help; those of the other one are neither shown nor known."""
    flags = []
    for flag in flags_of(_Flags):
        about, name = flag.about, flag.name
        if recipe == "finetune":
            about = _TUNING_HELP.get(name, about)
            if name in TUNING_DEFAULTS:
                about = f"{about.partition('; default')[0]} (default {TUNING_DEFAULTS[name]})"
        words = {**flag.words, _AUTO: _AUTO} if name == "mini_batch_size" else flag.words
        if name not in (_PRETRAINING if recipe == "finetune" else TUNING):
            flags.append(replace(flag, about=about, words=words))
    return flags


def _reject_idle_actions(actions: Actions) -> None:
    """Reject a verb that would be ignored: whoever typed it expected something."""
    imports, saves = actions.import_checkpoint is not None, actions.save_config is not None
    resumes = actions.resume is not None or actions.branch_from is not None
    gpus, minutes = actions.gpus, actions.pg_timeout_minutes
    answers = [actions.list_checkpoints, actions.dry_run, actions.preflight]
    many = sum([*answers, imports, saves]) > 1
    idle = gpus is not None and (actions.list_checkpoints or imports or saves)
    no_number = gpus not in (None, "auto") and not (gpus or "").strip("0").isdecimal()
    mistakes = {
        f"gpus {gpus}: give the number of ranks, at least 1, or auto": no_number,
        "--gpus goes with training, --dry_run and --preflight": idle,
        "--json goes with --list_checkpoints, --dry_run or --preflight": actions.json
        and not any(answers),
        "give one of --list_checkpoints, --dry_run, --preflight, --import_checkpoint and --save_config": many,
        "--branch_from begins a run, and --list_checkpoints starts none; leave one of them out": (
            actions.list_checkpoints and actions.branch_from is not None
        ),
        "--save_config goes without --resume: the run's config.json is there": saves and resumes,
        "--trust goes with --import_checkpoint": actions.trust and not imports,
        "--import_checkpoint begins a run; resume it afterwards": imports and resumes,
        "--fit_schedule plans a fresh run; a run that has begun keeps its schedule "
        "(or --max_steps N --allow_change max_steps)": actions.fit_schedule and resumes,
        f"pg_timeout_minutes {minutes:g} must be above 0, and at most a year": (
            not 0 < minutes <= _YEAR
        ),
        "--verify goes with --list_checkpoints": actions.verify and not actions.list_checkpoints,
    }
    for message, is_wrong in mistakes.items():
        if is_wrong:
            raise ConfigError(message)
    check_allowed(actions.allow_change, resumes=resumes)


def check_allowed(names: str | None, *, resumes: bool) -> None:
    """Check the value of --allow_change.

    Raises: ConfigError.
    """
    if names is not None and not resumes:
        raise ConfigError("--allow_change goes with --resume: a fresh run has nothing to change")
    for word in () if names is None else names.split(","):
        if (name := word.strip().lstrip("-")) not in LEAVES and name != "data":
            raise ConfigError(f"--allow_change {name}: no such setting; see --help, or `data`")


def _unknown(name: str, known: Collection[str]) -> str:
    owner = "finetune" if name in TUNING else "pretrain" if name in _PRETRAINING else None
    belongs = f"it belongs to {PROGRAMS[owner]}" if owner else None
    return answer(name) or belongs or unknown_flag(name, known)


def _elsewhere(name: str, value: str) -> str | None:
    if name == "model" and value.startswith("hf:"):
        return f"weights of the Hub are --init_from {value}"
    return answer_value(name, value)
