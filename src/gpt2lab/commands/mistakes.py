"""Mistakes of a command line, all of them in one line: what tyro rejects, in terms of the flags. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.commands import help_page
from gpt2lab.commands.help_page import Flag
from gpt2lab.errors import ConfigError

_TRUE_FALSE = {"true", "false", "yes", "no", "on", "off"}
_WHOLE, _NUMBER = "a whole number like 5000, 100M or 10B", "a number like 0.5"
_FP16 = " (fp16 needs loss scaling, whose state would make a resumed run differ; use bf16 or fp32)"
_FEW = 4  # choices that are read at a glance: no guess which one was meant


class Mistakes:
    """What is wrong with the words of one command line."""

    def __init__(self, target: Any, argv: list[str], about: str) -> None:
        """Know the flags of the dataclass `target`, or of that one of a union which `argv` names.

        Raises: ConfigError if it names none of a union.
        """
        self.verb = help_page.name_in(about)
        members = help_page.members_of(target)
        if len(members) > 1:
            chosen = next((word for word in argv if word in members), None)
            if chosen is None:
                raise ConfigError(_no_verb(argv, members))
            target = members[chosen]
        else:
            (target,) = members.values()
        self.flags: dict[str, Flag] = {flag.name: flag for flag in help_page.flags_of(target)}
        self._order = [_name_of(word) for word in argv]
        self._found: dict[str, str] = {}  # by the flag

    def take(
        self,
        argv: list[str],
        *,
        unknown: Callable[[str, Collection[str]], str] | None,
        elsewhere: Callable[[str, str], str | None],
    ) -> list[str]:
        """Note what tyro need not see, and return the other words.

        `unknown` words the answer to a flag that is not there, None where those are passed on; `elsewhere` says what a
        value of another program is here.
        """
        kept: list[str] = []
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*kept, word, *rest]
            if not word.startswith("--"):
                kept.append(word)
                continue
            name, (_, equals, value) = _name_of(word), word.partition("=")
            flag = self.flags.get(name) or self.flags.get(name.removeprefix("no_"))
            if flag is None and unknown is not None:
                known = [key for key, other in self.flags.items() if not other.is_argument]
                self._found[name] = unknown(name, known)
                del rest[: _values(rest, at_most=len(rest))]
            elif flag is None:
                kept.append(word)
            elif not flag.kind and not flag.is_argument:
                if equals or (rest and rest[0].lower() in _TRUE_FALSE):
                    off = f"--no_{flag.name}" if flag.turns_off else "leave it out"
                    self._found[name] = f"--{flag.name} is a switch: give it alone, or {off}"
                    del rest[: not equals]
                else:
                    kept.append(word)
            else:
                value = value if equals else rest[0] if rest else ""
                ours = elsewhere(name, value)
                if ours is None:
                    kept.append(word)
                else:
                    self._found[name] = f"--{name} {value}: {ours}"
                    del rest[: not equals]
        return kept

    def explain(self, complaint: str, words: list[str]) -> list[str]:
        """Note what tyro's box says, and return the words without that flag, to look for the next mistake.

        Raises: ConfigError with all mistakes if nothing is left to look at.
        """
        text = _message_in(complaint)
        if found := re.match(r"Missing value for argument '--(\w+)'", text):
            name = found[1]
            what = f"--{name}: the value is missing"
            what += f" ({self.flags[name].about})" if name in self.flags else ""
        elif found := re.match(r"invalid choice '(.*)' for argument '--(\w+)'", text):
            name = found[2]
            what = self._wrong_choice(name, found[1], text)
        elif found := re.match(r"Error parsing --(\w+): (.*)", text):
            name = found[1]
            what = f"--{name}{_wrong_value(found[2])}"
        else:
            missing = self._missing(text, words) if text.startswith("Missing") else text
            if self._found:  # an argument may be missing only because it stood behind a wrong flag
                raise ConfigError(self.line())
            raise ConfigError(missing)
        if name in self._found or name not in map(_name_of, words):
            raise ConfigError(text)
        self._found[name] = what
        return self._without(words, name)

    def line(self, *more: str) -> str:
        """Return all mistakes in the order in which they were typed, then others; empty if there are none."""
        names = sorted(self._found, key=self._order.index)
        return "; ".join([*(self._found[name] for name in names), *more])

    def _wrong_choice(self, name: str, value: str, text: str) -> str:
        choices = self.flags[name].choices if name in self.flags else ()
        if name == "model" and value.startswith("hf:") and "init_from" in self.flags:
            return f"--model {value}: weights of the Hub are --init_from {value}"
        if not choices:
            return text
        note = _FP16 if (name, value) == ("dtype", "fp16") else ""
        wrong = f"--{name} {value}: give one of {', '.join(choices)}{note}"
        hint = fmt.did_you_mean(value, choices) if len(choices) > _FEW else ""
        return f"{wrong}; {hint}" if hint else wrong

    def _missing(self, text: str, words: list[str]) -> str:
        """Say which of the flags and arguments that must be given are not there."""
        shown = re.sub(r"\W+", "", text)  # as tyro breaks lines
        given = set(map(_name_of, words))
        problems = []
        for flag in self.flags.values():
            is_named = f"'{flag.name}'" in text or re.sub(r"\W+", "", flag.about) in shown
            if flag.is_required and is_named and flag.name not in given:
                name = flag.name.upper() if flag.is_argument else f"--{flag.name}"
                problems.append(f"{name} is missing: {flag.about}")
        asks = f"{paths.command(self.verb)} --help" if self.verb else "--help"
        return "; ".join([*problems, f"see {asks}"]) if problems else text

    def _without(self, words: list[str], name: str) -> list[str]:
        """Return the words without a flag and its values."""
        kept: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if _name_of(word) != name:
                kept.append(word)
            elif "=" not in word:
                many = self.flags[name].kind.endswith("...") if name in self.flags else True
                del rest[: _values(rest, at_most=len(rest) if many else 1)]
        return kept


def _name_of(word: str) -> str:
    """Return the name of the flag that a word is; a word that is none, or an argument, never equals a flag's name."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else f" {word}"


def _values(words: list[str], *, at_most: int) -> int:
    """Count the words before the next flag."""
    flags = (place for place, word in enumerate(words) if word.startswith("--"))
    return min(next(flags, len(words)), at_most)


def _no_verb(argv: list[str], members: Collection[str]) -> str:
    *others, last = members
    verbs = f"{', '.join(others)} or {last}"
    typed = next((word for word in argv if not word.startswith("-")), None)
    return (
        f"give a verb: {verbs}"
        if typed is None
        else f"unknown verb {typed!r}: {fmt.did_you_mean(typed, members, verbs)}"
    )


def _wrong_value(what: str) -> str:
    """Return what follows the flag's name, from the words of a type's conversion."""
    if found := re.match(r"no type matching .*(INT|FLOAT).* from \['(.*?)'\]", what):
        return f" {found[2]}: not {_WHOLE if found[1] == 'INT' else _NUMBER}"
    if found := re.match(r"'(.*)' is not a whole number", what):
        return f" {found[1]}: not {_WHOLE}"
    if found := re.match(r"could not convert string to float: '(.*)'", what):
        return f" {found[1]}: not {_NUMBER}"
    return f": {what}"


def _message_in(box: str) -> str:
    """Take the message out of tyro's box: what stands between its first two rules."""
    parts = re.split(r"^ *-+ *$", box, flags=re.M)
    message = " ".join(parts[1].split()) if len(parts) > 1 else ""
    return message or "bad command line; see --help"
