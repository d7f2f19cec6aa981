"""The command line of the trainer: flags are the leaf names of Config, plus a few verbs. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from gpt2lab import fmt, paths
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import LENGTHS, Config, Recipe, TuningConfig
from gpt2lab.config.settings import LEAVES, is_path, override, to_flat
from gpt2lab.errors import ConfigError

# Flags of the program that this one replaces; they meet people's fingers and scripts for years to come.
RENAMED = {
    "num_layers": "--n_layer",
    "embd_size": "--n_embd",
    "num_heads": "--n_head",
    "logdir": "--checkpoint_dir (logs live in the run's folder)",
    "tensorboard_dir": "--checkpoint_dir (TensorBoard files live in the run's folder)",
    "steps_per_epoch": "--num_epochs (an epoch is computed from the data)",
}


def _read_count(words: list[str]) -> int:
    try:
        return fmt.parse_count(words[0])
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{words[0]!r} is not a whole number like 5000, 100M or 10B") from None


def _whole_numbers(known: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Let every flag that takes a whole number take 100M for 100_000_000."""
    if known.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=_read_count,
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def option(default: Any, help: str) -> Any:
    """Declare a flag of a door: a dataclass field with its help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Verbs:
    """What to do, as opposed to what the run is."""

    resume: str | None = option(
        None, "latest | auto (latest or fresh) | best | STEP | folder of a checkpoint"
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
        "try disk, memory, data, one small step and the network for up to a minute, say GO or NO-GO, and exit",
    )
    json: bool = option(
        False, "with --list_checkpoints, --dry_run or --preflight: one JSON object on stdout"
    )
    import_checkpoint: Path | None = option(
        None,
        "a .pt of nanoGPT or of the program that this one replaces: make it the first checkpoint of a run, and exit",
    )
    trust: bool = option(
        False, "with --import_checkpoint: read a file whose settings are pickled objects"
    )
    preset: Literal["1x4090", "1xa100", "1xh200", "4xh200", "8xh100"] | None = option(
        None,
        "cards to train on: sets the mini batch that fits them, where none was typed, and says what speed to expect; "
        "tokens per step stay",
    )
    allow_change: str | None = option(
        None, "comma-separated settings a resume may change; `data` for other data"
    )
    fit_schedule: bool = option(
        False,
        "with --max_hours: as many steps as surely end in time, so that the decay is complete",
    )
    stop_after_steps: int | None = option(
        None, "stop and save once N steps of the run are done; schedule untouched"
    )
    stop_at: str | None = option(
        None, "stop and save before this moment: HH:MM or 2026-11-21T18:30; schedule untouched"
    )
    pg_timeout_minutes: float = option(
        60.0, "the process group's timeout, of this start; --hang_seconds notices a hang before"
    )


@dataclass(frozen=True)
class _Flags:
    verbs: Annotated[Verbs, tyro.conf.FlagCreatePairsOff] = field(default_factory=Verbs)
    config: Config = field(
        default_factory=Config
    )  # without `tuning`, which is not on its command line


@dataclass(frozen=True)
class _TuningVerbs(Verbs):
    """What to do, as opposed to what the run is."""

    # Of pretraining alone; suppressed, a flag is neither shown nor known.
    import_checkpoint: Annotated[Path | None, tyro.conf.Suppress] = None
    trust: Annotated[bool, tyro.conf.Suppress] = False
    fit_schedule: Annotated[bool, tyro.conf.Suppress] = False


@dataclass(frozen=True)
class _TuningFlags(_Flags):
    verbs: Annotated[_TuningVerbs, tyro.conf.FlagCreatePairsOff] = field(
        default_factory=_TuningVerbs
    )
    tuning: TuningConfig = field(default_factory=TuningConfig)


PROGRAMS = {"pretrain": "src/train.py", "finetune": "src/finetune.py"}
_ABOUT = {
    "pretrain": "Train GPT-2 on token shards.",
    "finetune": """Fine-tune a model on conversations: python src/finetune.py --init_from RUN --instructions FILE.jsonl

The defaults below are pretraining's. Here, where nothing is typed: num_epochs 3, 16 rows a step (4 for small models),
a tenth of max_lr (half of it with adapters), weight_decay 0, shuffle windows, eval_freq, sample_freq and
checkpoint_freq 50, keep_checkpoints 3, epoch_checkpoints off.""",
}
_TUNING = frozenset(TuningConfig.__dataclass_fields__)
_PRETRAINING = frozenset(_TuningVerbs.__annotations__)  # those that it suppresses


@dataclass(frozen=True)
class Command:
    """A parsed command line, not yet combined with any saved settings."""

    argv: tuple[str, ...]
    verbs: Verbs
    typed: frozenset[str]  # names of the settings that the user gave
    finds_mini_batch: bool = False  # `--mini_batch_size auto`
    recipe: Recipe = "pretrain"

    def with_flags(self, *flags: str, instead_of: tuple[str, ...] = ()) -> Command:
        """Return the command with flags added, and those that set `instead_of` left out."""
        return parse([*_without(list(self.argv), instead_of), *flags], self.recipe)

    def over(self, base: Config) -> Config:
        """Return `base` with what the user typed on top; a typed preset counts as typing each of its settings.

        Typed paths are resolved against the working directory, all others against the repository.
        """
        flags = _parse(self.argv, base, self.recipe)
        typed = {name: value for name, value in to_flat(flags.config).items() if name in self.typed}
        for name in typed:
            if is_path(name) and typed[name] is not None:
                typed[name] = paths.from_working_directory(Path(typed[name]))
        if typed.get("instructions"):
            typed["instructions"] = _resolve_source(typed["instructions"])
        if "model" in typed and typed["model"] != base.model.model:
            base = preset(typed["model"], base)
        if any(name in typed for name in LENGTHS):  # the three are one setting in three units
            typed |= {name: None for name in LENGTHS if name not in typed}
        config = override(base, typed)
        files = {name: value for name, value in to_flat(config).items() if value and is_path(name)}
        return override(config, {name: paths.from_repository(Path(p)) for name, p in files.items()})

    def fresh(self) -> Config:
        """Return the settings of a fresh start: defaults, preset, flags."""
        return self.over(preset(_parse(self.argv, Config(), self.recipe).config.model.model))


def _resolve_source(name: str) -> str:
    """Return what --instructions means from any working directory."""
    is_name = name == "demo" or name.startswith("hf:")
    return name if is_name else str(paths.from_working_directory(Path(name)))


def parse(argv: list[str], recipe: Recipe = "pretrain") -> Command:
    """Parse the trainer's command line, or that of another recipe.

    Raises: ConfigError with one line; SystemExit(0) after printing help.
    """
    finds_mini_batch = _asks_for_search(argv)
    if finds_mini_batch:
        argv = _without(argv, ("mini_batch_size",))
    flags = _parse(tuple(argv), Config(), recipe)
    names = {
        token[2:].partition("=")[0].replace("-", "_") for token in argv if token.startswith("--")
    }
    typed = {name.removeprefix("no_") if name not in LEAVES else name for name in names}
    typed &= set(LEAVES)
    lengths = [f"--{name}" for name in LENGTHS if name in typed]
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(lengths)} both set the length of the run; give one of them"
        )
    _refuse_idle_verbs(flags.verbs)
    if recipe == "finetune" and (finds_mini_batch or "data_dir" in typed):
        name = "--mini_batch_size auto" if finds_mini_batch else "--data_dir"
        raise ConfigError(f"{name} is for pretraining, {PROGRAMS['pretrain']}; leave it out here")
    if flags.verbs.preflight and (finds_mini_batch or flags.verbs.fit_schedule):
        raise ConfigError(
            "--preflight tries one setting; give --mini_batch_size and the run's length as numbers"
        )
    return Command(
        argv=tuple(argv),
        verbs=flags.verbs,
        typed=frozenset(typed),
        finds_mini_batch=finds_mini_batch,
        recipe=recipe,
    )


def _asks_for_search(argv: list[str]) -> bool:
    """Tell whether the mini batch is to be found; the setting itself is always a number."""
    words = (
        " ".join(argv)
        .replace("=", " ")
        .replace("-batch-", "_batch_")
        .replace("mini_batch-", "mini_batch_")
    )
    return re.search(r"--mini_batch_size auto\b", words) is not None


def _without(argv: list[str], names: tuple[str, ...]) -> list[str]:
    """Return a command line without some flags and their values."""
    kept, skips = [], False
    for token in argv:
        if skips:
            skips = False
            continue
        name, equals, _ = token.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") in names:
            skips = not equals
            continue
        kept.append(token)
    return kept


def _refuse_idle_verbs(verbs: Verbs) -> None:
    """Refuse a verb that would be ignored: whoever typed it expected something."""
    imports = verbs.import_checkpoint is not None
    asks = [verbs.list_checkpoints, verbs.dry_run, verbs.preflight, imports]
    if verbs.json and not any(asks[:3]):
        raise ConfigError("--json goes with --list_checkpoints, --dry_run or --preflight")
    if sum(asks) > 1:
        raise ConfigError(
            "give one of --list_checkpoints, --dry_run, --preflight and --import_checkpoint"
        )
    if verbs.trust and not imports:
        raise ConfigError("--trust goes with --import_checkpoint")
    if imports and verbs.resume is not None:
        raise ConfigError("--import_checkpoint begins a run; resume it afterwards")
    if verbs.fit_schedule and verbs.resume is not None:
        raise ConfigError(
            "--fit_schedule plans a fresh run; a run that has begun keeps its schedule "
            "(or --max_steps N --allow_change max_steps)"
        )
    if not verbs.pg_timeout_minutes > 0:
        raise ConfigError(f"pg_timeout_minutes {verbs.pg_timeout_minutes:g} must be above 0")
    if verbs.verify and not verbs.list_checkpoints:
        raise ConfigError("--verify goes with --list_checkpoints")
    if verbs.allow_change is None:
        return
    if verbs.resume is None:
        raise ConfigError("--allow_change goes with --resume: a fresh run has nothing to change")
    names = [name.strip().lstrip("-") for name in verbs.allow_change.split(",")]
    unknown = [name for name in names if name not in LEAVES and name != "data"]
    if unknown:
        raise ConfigError(f"--allow_change {unknown[0]}: no such setting; see --help, or `data`")


def _parse(argv: tuple[str, ...], base: Config, recipe: Recipe) -> _Flags:
    target = _TuningFlags if recipe == "finetune" else _Flags
    default = (
        _TuningFlags(config=base, tuning=base.tuning)
        if recipe == "finetune"
        else _Flags(config=base)
    )
    flags = run_tyro(target, list(argv), default=default, about=_ABOUT[recipe])
    if isinstance(flags, _TuningFlags):
        return _Flags(flags.verbs, dataclasses.replace(flags.config, tuning=flags.tuning))
    assert isinstance(flags, _Flags)
    return flags


def run_tyro(
    target: Any,
    argv: list[str],
    *,
    default: Any = None,
    about: str | None = None,
    passed_on: list[str] | None = None,
) -> Any:
    """Let tyro fill the dataclass `target`, or one of a union of them, but report a mistake as one line.

    `about` stands at the top of the help; default the docstring. Words that `target` does not know are appended to
    `passed_on`, where that is given.

    Raises: ConfigError; SystemExit(0) after printing help.
    """
    complaints = io.StringIO()
    registry = ConstructorRegistry()
    registry.primitive_rule(_whole_numbers)
    try:
        with contextlib.redirect_stderr(complaints), registry:
            parsed, unknown = tyro.cli(
                target,
                args=argv,
                **({} if default is None else {"default": default}),
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes,),
                prog=Path(sys.argv[0]).name,
                description=about or target.__doc__,
            )
    except SystemExit as exit:
        if exit.code in (0, None):
            raise
        raise ConfigError(_one_line(complaints.getvalue())) from None
    if unknown and passed_on is None:
        raise ConfigError(_unknown(unknown[0], target))
    if passed_on is not None:
        passed_on += unknown
    return parsed


def _one_line(box: str) -> str:
    """Take the message out of tyro's box."""
    message = []
    for line in box.splitlines():
        if not line.startswith("│"):
            continue
        text = line.strip("│ ").strip()
        if set(text) <= {"─"}:
            break
        message.append(text)
    text = re.sub(r"\s+", " ", " ".join(message)) or "bad command line; see --help"
    if "'fp16'" in text:
        text += " (fp16 needs loss scaling, whose state would make a resumed run differ; use bf16 or fp32)"
    return text


def _unknown(token: str, target: Any) -> str:
    name = token.lstrip("-").partition("=")[0].replace("-", "_")
    if not token.startswith("-"):
        return f"unexpected argument {token!r}; see --help"
    if target not in (_Flags, _TuningFlags):
        return f"unknown flag {token.partition('=')[0]}; see --help"
    if name in RENAMED:
        return f"unknown flag --{name}: it is now {RENAMED[name]}"
    owner = "finetune" if name in _TUNING else "pretrain" if name in _PRETRAINING else None
    if owner is not None:
        return f"unknown flag --{name}: it belongs to {PROGRAMS[owner]}"
    known = [*LEAVES, *(leaf for leaf in Verbs.__dataclass_fields__)]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{close[0]}?" if close else "see --help"
    return f"unknown flag --{name}: {hint}"
