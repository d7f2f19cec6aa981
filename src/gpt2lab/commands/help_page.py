"""Help of a command, from its flags: a short page of the common ones, a long page of all. No torch."""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gpt2lab.config.flags import Flag

_COLUMN = 26  # where the help of a flag begins
_CHOICES = 30  # characters of the choices that stand beside a flag; longer ones stand in its help
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT", bool: ""}
_EXAMPLE = ("gpt2lab ", "torchrun ", "printf ", "python ")


def asked(argv: list[str]) -> Literal["short", "long"] | None:
    """Tell which help a command line asks for."""
    if {"--help-all", "--help_all"} & set(argv):
        return "long"
    return "short" if {"-h", "--help"} & set(argv) else None


def page(
    name: str, flags: Sequence[Flag], about: str, *, everything: bool, common: Collection[str] = ()
) -> str:
    """Return the help of a command that is called by `name`.

    `about`: what the command does, and examples. `common`: the flags of the short page; empty: all.
    """
    shown = sorted(flags, key=lambda flag: not flag.is_argument)
    arguments = [
        flag.shown if flag.is_required or flag.is_list else f"[{flag.shown}]"
        for flag in shown
        if flag.is_argument
    ]
    usage = " ".join(["usage:", name, *arguments, "[flags]"])
    lines = [usage, "", *_about(about)]
    if common and not everything:
        by_name = {flag.name: flag for flag in shown}
        shown = [by_name[one] for one in common if one in by_name]
    sections = dict.fromkeys(flag.section if everything else "" for flag in shown)
    for section in sections:
        lines += ["", *textwrap.wrap(section, _width())]
        for flag in shown:
            if not everything or flag.section == section:
                left = "" if flag.is_argument else f" {_beside(flag)[0]}".rstrip()
                lines.append(_row(flag.shown + left, _help(flag)))
    if len(shown) < len(flags):
        lines += ["", f"{name} --help-all: all {len(flags)} flags"]
    elif any(flag.is_switch for flag in shown):
        lines += ["", "--no_NAME turns a switch off again."]
    return "\n".join(lines)


def page_of_verbs(
    name: str, verbs: Mapping[str, type[Any]], about: str, *, others: Mapping[str, str]
) -> str:
    """Return the help of a command that takes one of several verbs; `others`: what verbs elsewhere do."""
    docs = {verb: (target.__doc__ or "").strip() for verb, target in verbs.items()}
    rows = {verb: doc.partition("\n\n")[0].replace("\n", " ") for verb, doc in docs.items()}
    lines = [f"usage: {name} VERB [flags]", "", *_about(about), ""]
    lines += [_row(verb, text) for verb, text in {**rows, **others}.items()]
    return "\n".join([*lines, "", f"{name} VERB --help: its flags"])


def about_verb(target: type[Any], about: str, name: str) -> str:
    """Return what stands at the top of a verb's help: its own docstring, and those of all examples that call it."""
    examples = [line for line in about.splitlines() if line.startswith(name)]
    return "\n".join([textwrap.dedent("    " + (target.__doc__ or "")).strip(), "", *examples])


def name_in(about: str) -> str:
    """Return the command that the examples of a description call."""
    called = re.search(r"^gpt2lab ([\w-]+)", about, flags=re.M)
    return called[0] if called else "gpt2lab"


def _beside(flag: Flag) -> tuple[str, bool]:
    """Return what stands beside a flag, and whether its choices are too long for that."""
    choices = "|".join(flag.choices)
    is_long = len(choices) > _CHOICES
    kind = ("NAME" if is_long else choices) or _METAVARS[flag.type]
    return f"{kind} ..." if flag.is_list else kind, is_long


def _help(flag: Flag) -> str:
    text = flag.about
    if _beside(flag)[1]:
        text += f": {', '.join(flag.choices)}"
    given = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    is_plain = flag.default not in (dataclasses.MISSING, None, False, (), "")
    shows = is_plain and "default" not in text
    return f"{text} (default {' '.join(map(str, given))})" if shows else text


def _width() -> int:
    return max(60, min(shutil.get_terminal_size().columns, 100)) - 1


def _row(name: str, help: str) -> str:
    """Write a flag beside its help, or above it if it is long."""
    indent = " " * _COLUMN
    text = textwrap.fill(
        help, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    left = f"  {name}"
    return left.ljust(_COLUMN) + text[_COLUMN:] if len(left) < _COLUMN - 1 else f"{left}\n{text}"


def _about(about: str) -> Iterator[str]:
    """Yield the lines of a description: paragraphs filled, examples as they are."""
    for number, paragraph in enumerate(about.strip().split("\n\n")):
        yield from [""] if number else []
        lines = paragraph.splitlines()
        if lines and lines[0].startswith(_EXAMPLE):
            yield from (f"  {line}" for line in lines)
        else:
            yield from textwrap.wrap(" ".join(lines), _width())
