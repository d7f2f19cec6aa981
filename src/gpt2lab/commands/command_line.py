"""The command line of the trainer: flags are the leaf names of Config, plus a few actions. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from gpt2lab import fmt, paths
from gpt2lab.commands import help_page
from gpt2lab.commands.mistakes import Mistakes
from gpt2lab.config.other_programs import answer, answer_value
from gpt2lab.config.request import RunRequest, make_request
from gpt2lab.config.schema import LENGTHS, Config, RecipeName, TuningConfig
from gpt2lab.config.settings import (
    LEAVES,
    from_working_directory,
    to_flat,
)
from gpt2lab.config.settings_file import OF_SHARDS, PROGRAMS, TUNING, read_file
from gpt2lab.errors import ConfigError


def _read_count(words: list[str]) -> int:
    try:
        return fmt.parse_count(words[0])
    except ValueError:
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


def option(default: Any, help: str, *, least: int | None = None) -> Any:
    """Declare a flag of a command: a dataclass field with its help and the smallest number that it takes."""
    return field(default=default, metadata={"help": help, "least": least})


def check_least(flags: Any) -> None:
    """Reject numbers below the smallest that their flags take.

    Raises: ConfigError.
    """
    for leaf in dataclasses.fields(flags):
        value, least = getattr(flags, leaf.name), leaf.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise ConfigError(f"{leaf.name} {value} must be at least {least}")


def argument(help: str) -> Any:
    """Declare an argument that must be given."""
    return field(metadata={"help": help})


# A model to load: its help, the same in every command.
TARGET = "a run (name or folder), a checkpoint's folder, a Hugging Face folder, or hf:NAME"


@dataclass(frozen=True)
class Actions:
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
    preset: Literal["1x4090", "1xa100", "1xh200", "4xh200", "8xh100"] | None = option(
        None,
        "GPUs to train on: sets the mini batch that fits them, unless typed, and prints the expected speed; "
        "tokens per step stay",
    )
    allow_change: str | None = option(
        None, "comma-separated settings that a resume may change; `data` for other data"
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
    actions: Annotated[Actions, tyro.conf.FlagCreatePairsOff] = field(default_factory=Actions)
    config: Config = field(default_factory=Config)  # without `tuning`: not on its command line


@dataclass(frozen=True)
class _TuningActions(Actions):
    """What to do, as opposed to what the run is."""

    # Of pretraining alone; suppressed, a flag is neither shown nor known.
    import_checkpoint: Annotated[Path | None, tyro.conf.Suppress] = None
    trust: Annotated[bool, tyro.conf.Suppress] = False
    fit_schedule: Annotated[bool, tyro.conf.Suppress] = False


@dataclass(frozen=True)
class _TuningFlags(_Flags):
    actions: Annotated[_TuningActions, tyro.conf.FlagCreatePairsOff] = field(
        default_factory=_TuningActions
    )
    tuning: TuningConfig = field(default_factory=TuningConfig)


_SIZES = ("n_layer", "n_head", "n_embd", "context_length")
_PLACE = ("run_name", "checkpoint_dir")
Page = Literal["train", "finetune", "list", "preflight", "import"]
# What the trainer is asked for: the head of its help, and the flags of its short page.
_PAGES: dict[Page, tuple[str, tuple[str, ...]]] = {
    "train": (
        """Train a GPT on token shards, or continue a run.

gpt2lab train --model gpt2-nano --max_steps 200
gpt2lab train --run_name my_run --resume latest
torchrun --nproc_per_node=4 -m gpt2lab.train --model gpt2""",
        (
            *("model", "data_dir", "run_name", "resume", "config", "init_from", "dry_run"),
            *("max_steps", "max_tokens", "num_epochs", "max_hours", "total_batch_size"),
            *("mini_batch_size", "max_lr", *_SIZES, "eval_freq", "checkpoint_freq"),
            *("use_tensorboard", "device", "checkpoint_dir"),
        ),
    ),
    "finetune": (
        """Fine-tune a model on conversations.

gpt2lab finetune --init_from my_run --instructions demo --run_name tuned
gpt2lab finetune --init_from hf:gpt2 --instructions pairs.jsonl --lora_r 8""",
        (
            *("init_from", "instructions", "run_name", "resume", "config", "dry_run", "lora_r"),
            *("num_epochs", "max_steps", "max_lr", "mini_batch_size", "device", "checkpoint_dir"),
        ),
    ),
    "list": (
        """List the checkpoints of all runs, or of one; reads manifests only.

gpt2lab list
gpt2lab list my_run --verify""",
        (*_PLACE, "verify", "json"),
    ),
    "preflight": (
        """Check disk, memory, data, one small step and the network before a run, and answer GO or NO-GO.

gpt2lab preflight --model gpt2
torchrun --nproc_per_node=4 -m gpt2lab preflight --run_name my_run""",
        ("model", "data_dir", *_PLACE, "resume", "mini_batch_size", "device", "json"),
    ),
    "import": (
        """Make a checkpoint of nanoGPT, or of this project's predecessor, the first one of a run.

gpt2lab import ckpt.pt --run_name taken_over --data_dir data/my_texts
gpt2lab import old/model.pt --trust --run_name old""",
        ("trust", *_PLACE, "data_dir", "config", "max_steps"),
    ),
}
# Where a page's words for a flag differ from those of training.
_WORDS: dict[Page, dict[str, str]] = {
    "finetune": {
        "init_from": "the model to fine-tune: a run, a checkpoint, a Hugging Face folder, or hf:NAME",
        "num_epochs": "passes over the conversations; default 3",
        "max_lr": "peak learning rate; default a tenth of the preset's, with adapters a half of the preset's",
        "mini_batch_size": "rows of conversations per forward pass on each rank; default 16 at most, 4 if small",
    },
    "list": {
        "run_name": "this run alone; default all",
        "verify": "read every byte and compare its hash; exit code 1 if one is damaged",
        "json": "print one JSON object",
    },
    "preflight": {"json": "print one JSON object"},
    "import": {"trust": "read a file whose settings are pickled objects"},
}
# Where a page's defaults differ from those of training; the recipe has them.
DEFAULTS: dict[Page, dict[str, str]] = {
    "finetune": {
        "shuffle": "windows",
        "total_batch_size": "16 rows of the context, 4 for small models",
        "num_epochs": "3",
        "max_lr": "a tenth of the preset's, with adapters a half",
        "muon_lr": "a tenth of the preset's",
        "weight_decay": "0",
        **dict.fromkeys(("eval_freq", "sample_freq", "checkpoint_freq"), "50"),
        "keep_checkpoints": "3",
        "epoch_checkpoints": "off",
        "sample_prompt": "the question Who are you?",
    }
}
_TAKES: dict[Page, str] = {"list": "[RUN]", "import": "FILE"}  # of the verb, before its flags
# The trainer's lengths, as the programs call them that only predict or time steps.
_LENGTHS = {"max_steps": "steps", "max_tokens": "tokens", "num_epochs": "epochs"}
_PRETRAINING = frozenset(_TuningActions.__annotations__)  # those that it suppresses


@dataclass(frozen=True)
class TrainArguments:
    """A parsed command line of the trainer: what to do, and the run that it is done to."""

    actions: Actions
    request: RunRequest


def parse(
    argv: list[str], recipe: RecipeName = "pretrain", *, page: Page | None = None
) -> TrainArguments:
    """Parse the trainer's command line, or that of another recipe; `page`: whose help is shown, default the recipe's.

    Raises: ConfigError with one line; SystemExit(0) after printing help.
    """
    words, finds_mini_batch = _take_auto(argv)
    target = _TuningFlags if recipe == "finetune" else _Flags
    page = page or ("finetune" if recipe == "finetune" else "train")
    about, common = _PAGES[page]
    if (how := help_page.asked(words)) is not None:
        shown = help_page.page(
            target,
            words,
            about,
            everything=how == "long",
            common=common,
            takes=_TAKES.get(page, ""),
            words=_WORDS.get(page, {}),
            defaults=DEFAULTS.get(page, {}),
        )
        print(shown)
        raise SystemExit(0)
    flags = run_tyro(target, words, default=target(), about=about)
    config = flags.config
    if isinstance(flags, _TuningFlags):
        config = dataclasses.replace(config, tuning=flags.tuning)
    values = _typed_values(words, config)
    lengths = [f"--{name}" for name in LENGTHS if name in values]
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(lengths)} both set the length of the run; give one of them"
        )
    _reject_idle_actions(flags.actions)
    shards = sorted(OF_SHARDS & values.keys())
    if recipe == "finetune" and (finds_mini_batch or shards):
        name = "--mini_batch_size auto" if finds_mini_batch else f"--{shards[0]}"
        raise ConfigError(f"{name} is for pretraining, {PROGRAMS['pretrain']}; leave it out here")
    if flags.actions.preflight and (finds_mini_batch or flags.actions.fit_schedule):
        raise ConfigError(
            "--preflight tries one setting; give --mini_batch_size and the run's length as numbers"
        )
    path = flags.actions.config
    file = read_file(paths.from_working_directory(path), recipe) if path else {}
    actions = flags.actions
    given = values.keys() | file.keys()
    left_open = {"mini_batch_size"} if finds_mini_batch else set()
    if actions.preset is not None and "mini_batch_size" not in given:
        left_open.add("mini_batch_size")
    if actions.fit_schedule:
        left_open.add("max_steps")
    request = make_request(
        values,
        file=file,
        recipe=recipe,
        resume=actions.resume,
        allow_change=actions.allow_change,
        stop_after_steps=actions.stop_after_steps,
        stop_at=actions.stop_at,
        open_settings=left_open,
        timeout_minutes=actions.pg_timeout_minutes,
    )
    return TrainArguments(actions, request)


def names_of_flags(words: Sequence[str]) -> set[str]:
    """Return the names of the flags among the words of a command line."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}


def _typed_values(words: list[str], config: Config) -> dict[str, Any]:
    """Return {setting: value} of the flags among the words, paths resolved against the working directory."""
    names = names_of_flags(words)
    names = {name if name in LEAVES else name.removeprefix("no_") for name in names} & set(LEAVES)
    return from_working_directory({n: v for n, v in to_flat(config).items() if n in names})


def _take_auto(argv: list[str]) -> tuple[list[str], bool]:
    """Take `--mini_batch_size auto` out of a command line: the setting itself is always a number."""
    words: list[str] = []
    found = False
    for word in argv:
        name, _, value = word.partition("=")
        is_flag = name.replace("-", "_") == "__mini_batch_size"
        if is_flag and value == "auto":
            found = True
        elif word == "auto" and words and words[-1].replace("-", "_") == "__mini_batch_size":
            words.pop()
            found = True
        else:
            words.append(word)
    return words, found


def _reject_idle_actions(actions: Actions) -> None:
    """Reject a verb that would be ignored: whoever typed it expected something."""
    imports, resumes = actions.import_checkpoint is not None, actions.resume is not None
    saves = actions.save_config is not None
    asks = [actions.list_checkpoints, actions.dry_run, actions.preflight, imports, saves]
    for is_wrong, message in (
        (
            actions.json and not any(asks[:3]),
            "--json goes with --list_checkpoints, --dry_run or --preflight",
        ),
        (
            sum(asks) > 1,
            "give one of --list_checkpoints, --dry_run, --preflight, --import_checkpoint and --save_config",
        ),
        (saves and resumes, "--save_config goes without --resume: the run's config.json is there"),
        (actions.trust and not imports, "--trust goes with --import_checkpoint"),
        (imports and resumes, "--import_checkpoint begins a run; resume it afterwards"),
        (
            actions.fit_schedule and resumes,
            "--fit_schedule plans a fresh run; a run that has begun keeps its schedule "
            "(or --max_steps N --allow_change max_steps)",
        ),
        (
            not actions.pg_timeout_minutes > 0,
            f"pg_timeout_minutes {actions.pg_timeout_minutes:g} must be above 0",
        ),
        (actions.verify and not actions.list_checkpoints, "--verify goes with --list_checkpoints"),
        (
            actions.allow_change is not None and not resumes,
            "--allow_change goes with --resume: a fresh run has nothing to change",
        ),
    ):
        if is_wrong:
            raise ConfigError(message)
    if actions.allow_change is None:
        return
    names = [name.strip().lstrip("-") for name in actions.allow_change.split(",")]
    unknown = [name for name in names if name not in LEAVES and name != "data"]
    if unknown:
        raise ConfigError(f"--allow_change {unknown[0]}: no such setting; see --help, or `data`")


def run_tyro(
    target: Any,
    argv: list[str],
    *,
    default: Any = None,
    about: str | None = None,
    common: Collection[str] = (),
    passed_on: list[str] | None = None,
) -> Any:
    """Let tyro fill the dataclass `target`, or one of a union of them, but report a mistake as one line.

    `about` stands at the top of the help; default the docstring of the target's module. `common`: the flags of the
    short help, default all. Words that `target` does not know are appended to `passed_on`, where that is given.

    Raises: ConfigError; SystemExit(0) after printing help.
    """
    about = about or sys.modules[target.__module__].__doc__ or ""
    if how := help_page.asked(argv):
        print(help_page.page(target, argv, about, everything=how == "long", common=common))
        raise SystemExit(0)
    tyro._experimental_options["ansi_codes"] = False  # entry.py shows them as text
    # Else tyro draws its boxes by the encoding of stdout, and mistakes.py reads them.
    tyro._experimental_options["utf8_boxes"] = False
    trains = target in (_Flags, _TuningFlags)
    mistakes = Mistakes(target, argv, about)
    words = mistakes.take(
        argv,
        unknown=None if passed_on is not None else _unknown_here if trains else _unknown,
        elsewhere=answer_value if trains else lambda name, value: None,
    )
    registry = ConstructorRegistry()
    registry.primitive_rule(_whole_numbers)
    while True:
        complaints = io.StringIO()
        try:
            with contextlib.redirect_stderr(complaints), registry:
                parsed, unknown = tyro.cli(
                    target,
                    args=words,
                    **({} if default is None else {"default": default}),
                    return_unknown_args=True,
                    use_underscores=True,
                    config=(tyro.conf.OmitArgPrefixes,),
                    prog=Path(sys.argv[0]).name,
                )
            break
        except SystemExit as exit:
            if exit.code in (0, None):
                raise
        words = mistakes.explain(complaints.getvalue(), words)
    if passed_on is not None:
        passed_on += unknown
        unknown = []
    stray = [repr(word) for word in unknown if not word.startswith("-")]
    dashed = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    strange = [
        f"unknown flag {word}: {fmt.did_you_mean(word[1:], mistakes.flags, 'see --help', flag='--')}"
        for word in dashed
    ]
    if stray and not dashed:
        plural = "s" if len(stray) > 1 else ""
        is_file = Path(stray[-1].strip("'")).suffix in (".py", ".toml", ".json")
        hint = "settings of a file are --config FILE, .toml or .json" if is_file else "see --help"
        strange.append(f"unexpected argument{plural} {' '.join(stray)}; {hint}")
    if problems := mistakes.line(*strange):
        raise ConfigError(problems)
    check_least(parsed)
    return parsed


def _unknown(name: str, known: Collection[str]) -> str:
    """Answer a flag that is not among the known ones."""
    ours = _LENGTHS.get(name)
    hint = fmt.did_you_mean(name, known, "see --help", flag="--")
    if name == "fsdp_offload":
        hint = "what it moves to the CPU's memory is not counted; leave it out, for fsdp without it"
    return f"unknown flag --{name}: {f'here it is --{ours}' if ours in known else hint}"


def _unknown_here(name: str, known: Collection[str]) -> str:
    """Answer a flag that the trainer does not know."""
    owner = "finetune" if name in TUNING else "pretrain" if name in _PRETRAINING else None
    where = answer(name) or (f"it belongs to {PROGRAMS[owner]}" if owner else None)
    return f"unknown flag --{name}: {where}" if where else _unknown(name, known)
