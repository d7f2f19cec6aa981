"""Help of a command, from the dataclass of its flags: a short page of the common ones, a long page of all. No torch."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from gpt2lab import paths

SHORT, LONG = {"-h", "--help"}, {"--help-all", "--help_all"}
_COLUMN = 26  # where the help of a flag begins
_CHOICES = 30  # characters of the choices that stand beside a flag; longer ones stand in its help
_MANY_CHOICES = "NAME"
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", bool: ""}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag or argument, as help shows it."""

    name: str
    kind: str  # INT, a|b; empty for a switch
    help: str
    section: str
    is_argument: bool
    about: str  # the help without choices and default
    choices: tuple[str, ...] = ()
    is_required: bool = False
    turns_off: bool = True  # a switch that --no_NAME turns off


def asked(argv: list[str]) -> Literal["short", "long"] | None:
    """Tell which help a command line asks for."""
    return "long" if LONG & set(argv) else "short" if SHORT & set(argv) else None


def page(
    target: Any,
    argv: list[str],
    about: str,
    *,
    everything: bool,
    common: Collection[str] = (),
    takes: str = "",
    words: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> str:
    """Return the help of the dataclass `target`, or of that one of a union which `argv` names.

    `about`: what the command does, and examples, whose first one shows how it is called. `common`: the flags of the
    short page; empty: all. `takes`: what the verb takes before its flags, other than arguments of `target`. `words`:
    the help of flags on the short page, where it is another than that of `target`. `defaults`: those that are
    other than those of `target`.
    """
    name = f"gpt2lab {name_in(about) or ''}".rstrip()
    members = members_of(target)
    chosen = next((word for word in argv if word in members), None)
    if len(members) > 1 and chosen is None:
        rows = [_row(verb, _first_line(member.__doc__)) for verb, member in members.items()]
        usage = f"usage: {name} VERB [flags]"
        lines = [usage, "", *_about(about), "", *rows, "", f"{name} VERB --help: its flags"]
        return _as_typed("\n".join(lines), name)
    if chosen is not None:
        target, name = members[chosen], f"{name} {chosen}"
        examples = [line for line in about.splitlines() if line.startswith(name)]
        about = "\n".join([_text(target.__doc__), "", *examples])
    others = defaults or {}
    flags = [
        dataclasses.replace(
            one, help=f"{one.about.partition('; default')[0]} (default {others[one.name]})"
        )
        if one.name in others
        else one
        for one in sorted(flags_of(target), key=lambda one: not one.is_argument)
    ]
    shown = flags
    if common and not everything:
        shown = [flag for name in common for flag in flags if flag.name == name]
        helps = words or {}
        shown = [dataclasses.replace(one, help=helps.get(one.name, one.help)) for one in shown]
    arguments = [flag for flag in flags if flag.is_argument]
    takes_words = [takes] if takes else []
    named = [flag.name.upper() for flag in arguments]
    usage = " ".join(["usage:", name, *takes_words, *named, "[flags]"])
    lines = [usage, "", *_about(about)]
    sections = dict.fromkeys(flag.section for flag in shown) if everything else [""]
    for section in sections:
        lines += ["", section] if section else [""]
        for flag in shown:
            if not everything or flag.section == section:
                lines += [_row(_written(flag), flag.help)]
    if len(shown) < len(flags):
        lines += ["", f"{name} --help-all: all {len(flags)} flags"]
    elif any(not flag.kind for flag in shown):
        lines += ["", "--no_NAME turns a switch off again."]
    return _as_typed("\n".join(lines), name)


def _as_typed(text: str, name: str) -> str:
    """Call a verb by its file, where that was typed."""
    verb = f"{name} ".split(" ")[1]
    file = paths.script(verb)
    if Path(sys.argv[0]).name != Path(file).name:
        return text
    return text.replace(f"-m gpt2lab.{verb}", file).replace(f"gpt2lab {verb}", f"python {file}")


def name_in(about: str) -> str | None:
    """Return the verb that the examples of a description call; None if there are none."""
    called = re.search(r"^gpt2lab ([\w-]+)", about, flags=re.M)
    return called[1] if called else None


def members_of(target: Any) -> dict[str, Any]:
    """Return {verb: dataclass} of a union, or the one dataclass."""
    members = get_args(target) if get_origin(target) in (Union, UnionType) else (target,)
    return {_name_of(member): _plain(member)[0] for member in members}


def _plain(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type and what stands beside it in Annotated."""
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return kind, tuple(marks)
    return annotation, ()


def _name_of(member: Any) -> str:
    kind, marks = _plain(member)
    named = [mark.name for mark in marks if getattr(mark, "name", None)]
    return str(named[0]) if named else kind.__name__.lower()


def flags_of(target: Any, section: str = "", *, turn_off: bool = True) -> Iterator[Flag]:
    """Yield the flags of a dataclass and of those within it, in their order."""
    hints = get_type_hints(target, include_extras=True)
    for leaf in dataclasses.fields(target):
        kind, marks = _plain(hints[leaf.name])
        if tyro.conf.Suppress in marks and not dataclasses.is_dataclass(kind):
            continue
        if dataclasses.is_dataclass(kind):
            if tyro.conf.Suppress not in marks:
                own = leaf.metadata.get("help") or _first_line(kind.__doc__)
                yield from flags_of(
                    kind,
                    own if not _holds_sections(kind) else "",
                    turn_off=turn_off and tyro.conf.FlagCreatePairsOff not in marks,
                )
            continue
        shown, choices = _kind(kind), _choices(kind)
        about = help = leaf.metadata.get("help", "")
        if shown == _MANY_CHOICES:
            help = f"{help}: {', '.join(choices)}"
        default = leaf.default
        is_plain = default is not dataclasses.MISSING and default not in (None, False, (), "")
        if is_plain and "default" not in help:
            words = default if isinstance(default, tuple) else (default,)
            help += f" (default {' '.join(map(str, words))})"
        yield Flag(
            leaf.name,
            shown,
            help,
            section,
            tyro.conf.Positional in marks,
            about,
            choices,
            # Several words may be none.
            is_required=default is leaf.default_factory is dataclasses.MISSING
            and not shown.endswith("..."),
            turns_off=turn_off,
        )


def _holds_sections(kind: Any) -> bool:
    hints = get_type_hints(kind)
    return all(dataclasses.is_dataclass(hints[leaf.name]) for leaf in dataclasses.fields(kind))


def _bare(annotation: Any) -> Any:
    """Return a type without what stands beside it, and without None."""
    annotation, _ = _plain(annotation)
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    return annotation


def _kind(annotation: Any) -> str:
    """Return what stands beside a flag."""
    annotation = _bare(annotation)
    if get_origin(annotation) is tuple:
        return f"{_kind(get_args(annotation)[0])} ..."
    if get_origin(annotation) is Literal:
        beside = "|".join(_choices(annotation))
        return beside if len(beside) <= _CHOICES else _MANY_CHOICES
    return _METAVARS.get(annotation, "TEXT")


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words of which a flag takes one."""
    annotation = _bare(annotation)
    if get_origin(annotation) is tuple:
        return _choices(get_args(annotation)[0])
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


def _written(flag: Flag) -> str:
    if flag.is_argument:
        return flag.name.upper()
    return f"--{flag.name} {flag.kind}".rstrip()


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


def _text(docstring: str | None) -> str:
    return textwrap.dedent("    " + (docstring or "")).strip()


def _first_line(docstring: str | None) -> str:
    return _text(docstring).split("\n\n")[0].replace("\n", " ")


_EXAMPLE = ("gpt2lab ", "torchrun ", "printf ", "python ")


def _about(about: str) -> Iterator[str]:
    """Yield the lines of a description: paragraphs filled, examples as they are."""
    for number, paragraph in enumerate(_text(about).split("\n\n")):
        yield from [""] if number else []
        lines = paragraph.splitlines()
        if lines and lines[0].startswith(_EXAMPLE):
            yield from (f"  {line}" for line in lines)
        else:
            yield from textwrap.wrap(" ".join(lines), _width())
