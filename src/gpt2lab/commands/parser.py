"""Command lines from dataclasses, by argparse: a field is a flag or an argument, and all mistakes are one line.

No torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_type_hints

from gpt2lab import fmt, paths
from gpt2lab.commands import help_page
from gpt2lab.commands.verbs import within
from gpt2lab.config import other_programs
from gpt2lab.config.flags import Flag, check_least, flags_of, option
from gpt2lab.config.schema import Dtype
from gpt2lab.errors import ConfigError, raise_problems

_TRUE_FALSE = {"true", "false", "yes", "no", "on", "off"}
# The trainer's lengths, as the programs call them that only predict or time steps; nanoGPT's flags of sample.py.
_NAMED = {"max_steps": "steps", "max_tokens": "tokens", "num_epochs": "epochs"}
_NAMED |= {"start": "prompt", "out_dir": "checkpoint_dir"}
Unknown = Callable[[str, Collection[str]], str]  # (a flag, the known ones) -> what may be meant
Elsewhere = Callable[[str, str], str | None]  # (a flag, its value in another program) -> ours
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AmongRuns:
    """Where a command looks for runs."""

    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")

    def runs_folder(self) -> Path:
        """Return the folder of the runs.

        Raises: ConfigError if the typed one is not there.
        """
        folder = paths.runs_folder(self.checkpoint_dir)
        if self.checkpoint_dir and not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder")
        return folder


@dataclass(frozen=True, kw_only=True)
class WithJson:
    """The form of a command's answer."""

    json: bool = option(False, "print one JSON object")


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """What a model computes on."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Dtype = option("fp32", "matmul precision")


def parse_flags(
    target: type[Any] | Mapping[str, type[Any]],
    argv: list[str],
    *,
    about: str | None = None,
    name: str | None = None,
    common: Collection[str] = (),
    passed_on: list[str] | None = None,
) -> Any:
    """Fill the dataclass `target`, or that one of several which the first word names, from a command line.

    `about` stands at the top of the help; default the docstring of the target's module. `name`: how the command is
    called, one of several in that docstring; default as in the first example there. `common`: the flags of the short
    help, default all. Words from the first flag on that `target` does not know are appended to `passed_on`, where that
    is given.

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
        others = within(name.removeprefix("gpt2lab "))
        typed = next((word for word in argv if not word.startswith("-")), None)
        verb = typed and typed.replace("_", "-")
        if how and verb not in verbs:
            print(help_page.page_of_verbs(name, target, about, others=others))
            raise SystemExit(0)
        if verb is None or verb not in verbs:
            *first, last = known = [*verbs, *others]
            hint = f"{', '.join(first)} or {last}"
            if typed is None:
                raise ConfigError(f"give a verb: {hint}")
            raise ConfigError(f"unknown verb {typed!r}: {fmt.did_you_mean(typed, known, hint)}")
        target, words = verbs[verb], [word for word in argv if word is not typed]
        name, about = f"{name} {verb}", help_page.about_verb(verbs[verb], about, f"{name} {verb}")
    flags = list(flags_of(target))
    if how:
        print(help_page.page(name, flags, about, everything=how == "long", common=common))
        raise SystemExit(0)
    given = read_words(flags, words, passed_on=passed_on)
    missing = [flag for flag in flags if flag.is_required and flag.name not in given]
    if missing:
        told = "; ".join(f"{flag.shown} is missing: {flag.about}" for flag in missing)
        raise ConfigError(f"{told}; see {name} --help")
    found = fill(target, given)
    check_least(found)
    return found


def unknown_flag(name: str, known: Collection[str]) -> str:
    """Say what may have been meant by a flag that a command does not have."""
    if _NAMED.get(name) in known:
        return f"here it is --{_NAMED[name]}"
    if name == "data_dir" and {"out", "val_tokens"} <= set(known):  # the folder that prepare makes
        return "here it is --out"
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
    parser = _Parser(flags, elsewhere)
    cut = argv.index("--") if "--" in argv else len(argv)
    found, rest = parser.parse_known_args(parser.plain_words(argv[:cut]))
    for name, values in vars(found).items():
        if (flag := parser.flags[name]).is_switch:
            parser.given[name] = values
        for words in () if flag.is_switch else values:
            parser.take(flag, words if isinstance(words, list) else [words][: words is not None])
    if passed_on is not None:
        first = next((place for place, word in enumerate(rest) if _is_flag(word)), len(rest))
        passed_on += rest[first:]
        rest = rest[:first]
    strange = list(filter(_is_flag, rest))
    known = [flag.name for flag in flags if not flag.is_argument]
    for word in strange:
        what = unknown(name_of(word).lstrip(" -"), known)
        parser.mistakes[name_of(word)] = f"unknown flag {word.partition('=')[0]}: {what}"
    # Nobody knows which words are the values of an unknown flag.
    stray = [] if strange else parser.take_arguments(rest + argv[cut + 1 :])
    order = [name_of(word) for word in argv]
    problems = [parser.mistakes[name] for name in sorted(parser.mistakes, key=order.index)]
    if stray:
        is_file = Path(stray[-1]).suffix in (".py", ".toml", ".json")
        hint = "settings of a file are --config FILE, .toml or .json" if is_file else "see --help"
        plural = "s" if len(stray) > 1 else ""
        problems += [f"unexpected argument{plural} {' '.join(map(repr, stray))}; {hint}"]
    raise_problems(problems)
    return parser.given


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


class _Parser(argparse.ArgumentParser):
    """Finds the values in `given`, and in `mistakes` what is wrong, each by the flag's name."""

    def __init__(self, flags: Sequence[Flag], elsewhere: Elsewhere) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.flags = {flag.name: flag for flag in flags}
        self.elsewhere = elsewhere
        self.given: dict[str, Any] = {}
        self.mistakes: dict[str, str] = {}
        for flag in flags:
            if flag.is_switch:
                self.add_argument(f"--{flag.name}", action="store_true")
                self.add_argument(f"--no_{flag.name}", dest=flag.name, action="store_false")
            else:  # an argument may have its name before it; a missing value is one of the mistakes
                nargs = "*" if flag.is_list else "?"
                self.add_argument(f"--{flag.name}", action="append", nargs=nargs)

    def error(self, message: str) -> NoReturn:
        """Reject what argparse cannot read."""
        raise ConfigError(message)

    def plain_words(self, argv: list[str]) -> list[str]:
        """Write flags as argparse takes them, and note the values given to switches, where it would give up.

        Versions of argparse differ in which words they take for negative numbers, so these stand behind a `=`.
        """
        words: list[str] = []
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            name, (_, equals, value) = name_of(word), word.partition("=")
            flag = self.flags.get(name) or self.flags.get(name.removeprefix("no_"))
            if not word.startswith("--"):
                words.append(word)
            elif flag is None or not flag.is_switch:
                if flag and not equals and not flag.is_list and rest and _is_negative(rest[0]):
                    equals, value = "=", rest.pop(0)
                words.append(f"--{name}{equals}{value}")
            elif equals or (rest and rest[0].lower() in _TRUE_FALSE):
                self.mistakes[name] = (
                    f"--{flag.name} is a switch: give it alone, or --no_{flag.name}"
                )
                del rest[: not equals]
            else:
                words.append(f"--{name}")
        return words

    def take_arguments(self, words: list[str]) -> list[str]:
        """Give the words without a flag to the arguments in their order, and return what is left."""
        for flag in self.flags.values():
            if flag.name in self.given or flag.name in self.mistakes:
                continue
            if flag.is_argument and words:
                count = len(words) if flag.is_list else 1
                self.take(flag, words[:count])
                words = words[count:]
            elif flag.is_argument and flag.is_list:
                self.given[flag.name] = ()
        return words

    def take(self, flag: Flag, words: list[str]) -> None:
        """Note the value of a flag or argument, or the mistake in it."""
        answers = ((word, self.elsewhere(flag.name, word)) for word in words)
        answer = next((f"{flag.shown} {word}: {ours}" for word, ours in answers if ours), None)
        try:
            value = flag.read(words)
        except ValueError as mistake:
            self.mistakes[flag.name] = answer or str(mistake)
        else:
            before = self.given.get(flag.name) if flag.adds else None
            if isinstance(before, str) and value is not None:  # names with commas between them
                value = f"{before},{value}"
            self.given[flag.name] = before + value if isinstance(before, tuple) else value


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _is_negative(word)


def _is_negative(word: str) -> bool:
    return re.match(r"-[0-9.]", word) is not None
