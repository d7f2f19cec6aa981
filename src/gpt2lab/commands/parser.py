"""Command lines from dataclasses: a field is a flag or an argument, and all mistakes are one line.

No torch.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from gpt2lab import fmt
from gpt2lab.commands import help_page
from gpt2lab.config import other_programs
from gpt2lab.config.flags import Flag, check_least, flags_of
from gpt2lab.errors import ConfigError

_TRUE_FALSE = {"true", "false", "yes", "no", "on", "off"}
# The trainer's lengths, as the programs call them that only predict or time steps.
_LENGTHS = {"max_steps": "steps", "max_tokens": "tokens", "num_epochs": "epochs"}
Unknown = Callable[[str, Collection[str]], str]  # (a flag, the known ones) -> what may be meant
Elsewhere = Callable[[str, str], str | None]  # (a flag, its value in another program) -> ours
T = TypeVar("T")


def parse_flags(
    target: type[Any] | Mapping[str, type[Any]],
    argv: list[str],
    *,
    about: str | None = None,
    name: str | None = None,
    common: Collection[str] = (),
    passed_on: list[str] | None = None,
    others: Mapping[str, str] | None = None,
) -> Any:
    """Fill the dataclass `target`, or that one of several which the first word names, from a command line.

    `about` stands at the top of the help; default the docstring of the target's module. `name`: how the command is
    called, one of several in that docstring; default as in the first example there. `common`: the flags of the short
    help, default all. Words from the first flag on that `target` does not know are appended to `passed_on`, where that
    is given. `others`: what verbs do that are not in `target`, for the help.

    Raises: ConfigError with all mistakes in one line; SystemExit(0) after printing help.
    """
    verbs = target if isinstance(target, Mapping) else {}
    some = next(iter(verbs.values())) if isinstance(target, Mapping) else target
    if about is None:
        about = sys.modules[some.__module__].__doc__ or ""
        if name and not verbs:
            about = help_page.about_verb(some, about, name)
    name, how = name or help_page.name_in(about), help_page.asked(argv)
    words = argv
    if isinstance(target, Mapping):
        verb = next((word for word in argv if not word.startswith("-")), None)
        if how and verb not in verbs:
            print(help_page.page_of_verbs(name, target, about, others=others or {}))
            raise SystemExit(0)
        if verb is None or verb not in verbs:
            raise ConfigError(_no_verb(verb, [*verbs, *(others or {})]))
        target, words = verbs[verb], [word for word in argv if word is not verb]
        name, about = f"{name} {verb}", help_page.about_verb(verbs[verb], about, f"{name} {verb}")
    flags = list(flags_of(target))
    if how:
        print(help_page.page(name, flags, about, everything=how == "long", common=common))
        raise SystemExit(0)
    try:
        found = fill(target, read_words(flags, words, passed_on=passed_on))
    except MissingError as missing:
        raise ConfigError(f"{missing}; see {name} --help") from None
    check_least(found)
    return found


class MissingError(ConfigError):
    """A flag or an argument that must be given is missing."""


def unknown_flag(name: str, known: Collection[str]) -> str:
    """Say what may have been meant by a flag that a command does not have."""
    if _LENGTHS.get(name) in known:
        return f"here it is --{_LENGTHS[name]}"
    if name == "fsdp_offload":
        return "what it moves to the CPU's memory is not counted; leave it out, for fsdp without it"
    return fmt.did_you_mean(name, known, "see --help", flag="--")


def read_words(
    flags: Sequence[Flag],
    argv: list[str],
    *,
    unknown: Unknown = unknown_flag,
    elsewhere: Elsewhere = other_programs.answer_value,
    passed_on: list[str] | None = None,
) -> dict[str, Any]:
    """Return {name: value} of the flags and arguments on a command line.

    Raises: ConfigError with all mistakes in one line, in the order of typing.
    """
    by_name = {flag.name: flag for flag in flags if not flag.is_argument}
    given: dict[str, Any] = {}
    mistakes: dict[str, str] = {}
    others: list[str] = []  # arguments, and flags that are not known

    def take(flag: Flag, words: list[str]) -> None:
        answers = ((word, elsewhere(flag.name, word)) for word in words)
        answer = next((f"{flag.shown} {word}: {ours}" for word, ours in answers if ours), None)
        try:
            value = flag.read(words)
        except ValueError as mistake:
            mistakes[flag.name] = answer or str(mistake)
        else:
            given[flag.name] = given.get(flag.name, ()) + value if flag.adds else value

    cut = argv.index("--") if "--" in argv else len(argv)
    for word, flag, words in _typed(argv[:cut], by_name):
        if flag is None:
            others.append(word)
        elif not flag.is_switch:
            take(flag, words)
        elif words:
            off = f"--no_{flag.name}"
            mistakes[name_of(word)] = f"--{flag.name} is a switch: give it alone, or {off}"
        else:
            given[flag.name] = name_of(word) == flag.name
    if passed_on is not None:
        first = next((place for place, word in enumerate(others) if _is_flag(word)), len(others))
        passed_on += others[first:]
        others = others[:first]
    strange = list(filter(_is_flag, others))
    for word in strange:
        what = unknown(name_of(word).lstrip(" -"), by_name)
        mistakes[name_of(word)] = f"unknown flag {word.partition('=')[0]}: {what}"
    # Nobody knows which words are the values of an unknown flag.
    stray = [] if strange else others + argv[cut + 1 :]
    for flag in (flag for flag in flags if flag.is_argument):
        count = len(stray) if flag.is_list else 1
        if stray:
            take(flag, stray[:count])
        elif flag.is_list:
            given[flag.name] = ()
        stray = stray[count:]
    order = [name_of(word) for word in argv]
    problems = [mistakes[name] for name in sorted(mistakes, key=order.index)]
    if problems or stray:
        raise ConfigError("; ".join([*problems, *_unexpected(stray)]))
    missing = [flag for flag in flags if flag.is_required and flag.name not in given]
    if missing:
        raise MissingError("; ".join(f"{flag.shown} is missing: {flag.about}" for flag in missing))
    return given


def _typed(
    argv: Sequence[str], by_name: Mapping[str, Flag]
) -> Iterator[tuple[str, Flag | None, list[str]]]:
    """Yield each flag as it was typed, with its words; and, without a flag, each word that belongs to none."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, (_, equals, value) = name_of(word), word.partition("=")
        flag = by_name.get(name) or by_name.get(name.removeprefix("no_"))
        words = [value] if equals else []
        if flag is None or (flag.name != name and not flag.is_switch):
            yield f"--{name}{equals}{value}" if word.startswith("--") else word, None, []
            continue
        while rest and not equals and (flag.is_list or not words):
            is_text = not _is_flag(rest[0]) or (" " in rest[0] and name_of(rest[0]) not in by_name)
            if not (rest[0].lower() in _TRUE_FALSE if flag.is_switch else is_text):
                break
            words.append(rest.pop(0))
        yield word, flag, words


def fill(target: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass, and those in it, with the given values of its fields and the defaults of all others."""
    hints, given = get_type_hints(target), {}
    for leaf in dataclasses.fields(target):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[leaf.name]):
            given[leaf.name] = fill(hints[leaf.name], values)
        elif (name := leaf.name.rstrip("_")) in values:
            given[leaf.name] = values[name]
    return target(**given)


def name_of(word: str) -> str:
    """Return the name of the flag that a word is; that of a word which is none equals no flag's name."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else f" {word}"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _is_negative(word)


def _is_negative(word: str) -> bool:
    return re.match(r"-[0-9.]", word) is not None


def _unexpected(words: list[str]) -> Iterable[str]:
    if words:
        is_file = Path(words[-1]).suffix in (".py", ".toml", ".json")
        hint = "settings of a file are --config FILE, .toml or .json" if is_file else "see --help"
        plural = "s" if len(words) > 1 else ""
        yield f"unexpected argument{plural} {' '.join(map(repr, words))}; {hint}"


def _no_verb(typed: str | None, known: Sequence[str]) -> str:
    verbs = f"{', '.join(known[:-1])} or {known[-1]}"
    if typed is None:
        return f"give a verb: {verbs}"
    return f"unknown verb {typed!r}: {fmt.did_you_mean(typed, known, verbs)}"
