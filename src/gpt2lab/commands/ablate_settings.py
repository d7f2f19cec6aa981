"""The settings that `ablate` compares: a file of settings and grids of values. No torch."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gpt2lab import fmt
from gpt2lab.commands.command_line import Actions, action_words, parse
from gpt2lab.commands.parser import name_of
from gpt2lab.config.other_programs import answer
from gpt2lab.config.settings import LEAVES, is_list
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.lab.seed_runs import Setting, prefix_errors

_OURS = {"seed", "run_name", "checkpoint_dir", "resume"}


def take_grid(
    argv: Sequence[str], own: Collection[str]
) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Divide a command line into words of ablate, flags of the trainer, and {flag of the trainer: its several values}.

    `own`: the flags of ablate.

    Raises: ConfigError for a flag that neither has.
    """
    words: list[str] = []
    shared: list[str] = []
    grid: dict[str, list[str]] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name = name_of(word)
        if word[:2] != "--" or name in own:
            words.append(word)
            continue
        most, following = _words_of(name, own), [] if "=" in word else rest
        values = list(itertools.takewhile(lambda one: one[:2] != "--", following))[:most]
        del rest[: len(values)]
        if len(values) > 1 and not is_list(name):
            grid[name] = values
        else:
            shared += [word, *values]
    return words, shared, grid


def _words_of(name: str, own: Collection[str]) -> int | None:
    """Return the largest number of words that a flag of the trainer takes; None: any number, which makes a grid."""
    if name in LEAVES:
        return 0 if LEAVES[name][1].type == "bool" else None
    if name in Actions.__dataclass_fields__:
        return 0 if Actions.__dataclass_fields__[name].type == "bool" else 1
    if name.startswith("no_") and name[3:] in LEAVES:
        return 0
    known = [*own, *LEAVES, *Actions.__dataclass_fields__]
    hint = fmt.did_you_mean(name, known, "see gpt2lab ablate --help", flag="--")
    raise ConfigError(f"unknown flag --{name}: {answer(name) or hint}")


def cross(settings: dict[str, list[str]], grid: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return each setting with each combination of the grid's values; the first combination is the baseline.

    Raises: ConfigError if a value is duplicated.
    """
    for flag, values in grid.items():
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"--{flag}: {twice} is duplicated")
        settings = {
            "_".join(filter(None, (name, f"{flag}-{re.sub(r'[^A-Za-z0-9_.+-]', '_', value)}"))): [
                *flags,
                f"--{flag}={value}",
            ]
            for name, flags in settings.items()
            for value in values
        }
    return settings


def read_settings(path: Path) -> dict[str, list[str]]:
    """Return {setting: its flags} of a settings file, in its order; `#` begins a comment line, `@REF` names code.

    Raises: ConfigError naming the line, DataError if there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path}: {why}; values to compare are flags: --weight_decay 0 0.1"
        ) from error
    settings: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, flags = line.partition(":")
        if not colon or re.fullmatch(r"[\w.+-]+", name.strip()) is None:
            raise ConfigError(f"{path} line {number}: not `name: flags of the trainer`")
        if name.strip() in settings:
            raise ConfigError(f"{path} line {number}: setting {name.strip()} is duplicated")
        try:
            settings[name.strip()] = shlex.split(re.sub(r"^\s*@", "--code=", flags))
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
    if len(settings) < 2:
        count = fmt.number_of(len(settings), "setting")
        raise ConfigError(f"{path}: {count}; a comparison needs at least 2")
    return settings


def read_requests(
    settings: Mapping[str, Sequence[str]], shared: Sequence[str]
) -> dict[str, Setting]:
    """Return {setting: what the trainer is asked for}, given the flags of each setting and those of all.

    Raises: ConfigError for flags that the trainer does not have, and for those that ablate sets itself.
    """
    found = {}
    for name, own in settings.items():
        refs = [word.partition("=")[2] for word in own if word.startswith("--code=")]
        words = [*shared, *(word for word in own if not word.startswith("--code="))]
        with prefix_errors(name):
            # A --config file may have a seed; ablate overrides it.
            if ours := _OURS & set(map(name_of, words)):
                raise ConfigError(f"--{min(ours)} is set by ablate itself")
            if len(refs) > 1:
                raise ConfigError(f"it names code twice, {' and '.join(refs)}")
            found[name] = Setting(
                parse(words).request, tuple(action_words(words)), refs[0] if refs else None
            )
    return found
