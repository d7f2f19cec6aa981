"""Flags are the fields of dataclasses: how they are declared, and what a declaration says. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gpt2lab import fmt
from gpt2lab.errors import ConfigError

_WHOLE, _NUMBER = "a whole number like 5000, 100M or 10B", "a number like 0.5"
_FEW = 4  # choices that are read at a glance: no guess which one was meant

# The help of a run, and of a model to load: the same in every command.
RUN = "a run (name or its beginning, latest, or folder)"
TARGET = f"{RUN}, RUN@STEP, a checkpoint's folder, a Hugging Face folder, or hf:NAME"


def option(default: Any, help: str, *, least: int | None = None, adds: bool = False) -> Any:
    """Declare a flag: `least` is the smallest number that it takes; `adds`: given twice, its words add up."""
    return field(default=default, metadata={"help": help, "least": least, "adds": adds})


def required(help: str) -> Any:
    """Declare a flag that must be given."""
    return field(metadata={"help": help})


def argument(help: str, *, default: Any = MISSING) -> Any:
    """Declare an argument: a word without a flag. It must be given unless it has a default or takes several words."""
    return field(default=default, metadata={"help": help, "is_argument": True})


def check_least(flags: Any) -> None:
    """Reject numbers below the smallest that their flags take.

    Raises: ConfigError.
    """
    for leaf in dataclasses.fields(flags):
        value, least = getattr(flags, leaf.name), leaf.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise ConfigError(f"{leaf.name} {value} must be at least {least}")


@dataclass(frozen=True)
class Flag:
    """A flag or an argument: what the field of a dataclass says."""

    name: str
    type: Any  # of one word: int, float, bool, str, Path or a Literal
    about: str
    default: Any  # dataclasses.MISSING: must be given
    section: str  # heading in the long help; empty for the fields of the command itself
    is_argument: bool
    is_list: bool
    length: int | None  # words of a list that takes so many
    words: Mapping[str, Any]  # that stand for values: None where it is optional
    adds: bool  # given twice, its words add up

    @property
    def is_switch(self) -> bool:
        """Tell whether it takes no value."""
        return self.type is bool

    @property
    def is_required(self) -> bool:
        """Tell whether it must be given; several words may be none."""
        return self.default is MISSING and not self.is_list

    @property
    def shown(self) -> str:
        """Its name as people type it."""
        return self.name.upper() if self.is_argument else f"--{self.name}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The words of which it takes one."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def read(self, words: list[str]) -> Any:
        """Return the value that words mean.

        Raises: ValueError with the mistake.
        """
        if not words and (not self.is_list or self.default != ()):
            raise ValueError(f"{self.shown}: the value is missing ({self.about})")
        if self.length is not None and len(words) != self.length:
            raise ValueError(f"{self.shown} {' '.join(words)}: give {self.length} values")
        values = tuple(map(self._read_word, words))
        return values if self.is_list else values[0]

    def _read_word(self, word: str) -> Any:
        if word in self.words:
            return self.words[word]
        wrong = f"{self.shown} {word}: "
        if self.choices:
            if word not in self.choices:
                hint = fmt.did_you_mean(word, self.choices) if len(self.choices) > _FEW else ""
                fix = f"give one of {', '.join(self.choices)}"
                raise ValueError(wrong + "; ".join(filter(None, [fix, hint])))
            return word
        try:
            return fmt.parse_count(word) if self.type is int else self.type(word)
        except ValueError:
            raise ValueError(f"{wrong}not {_WHOLE if self.type is int else _NUMBER}") from None


def flags_of(target: type, section: str = "") -> Iterator[Flag]:
    """Yield the flags of a dataclass and of those in it, in their order, keywords last, hidden ones left out."""
    hints = get_type_hints(target)
    for leaf in sorted(dataclasses.fields(target), key=lambda leaf: bool(leaf.kw_only)):
        if leaf.metadata.get("is_hidden"):
            continue
        kind, words, length = hints[leaf.name], {}, None
        if dataclasses.is_dataclass(kind):
            yield from flags_of(kind, (kind.__doc__ or "").partition("\n\n")[0].replace("\n", " "))  # type: ignore[arg-type]
            continue
        if get_origin(kind) in (Union, UnionType):
            words = {"None": None}
            (kind,) = (one for one in get_args(kind) if one is not NoneType)
        if is_list := get_origin(kind) is tuple:
            kind, *others = get_args(kind)
            length = None if others == [...] else 1 + len(others)
        yield Flag(
            name=leaf.name.rstrip("_"),  # `from_` is Python's name of --from
            type=kind,
            about=leaf.metadata["help"],
            default=leaf.default,
            section=section,
            is_argument=leaf.metadata.get("is_argument", False),
            is_list=is_list,
            length=length,
            words=words,
            adds=leaf.metadata.get("adds", False),
        )
