"""Numbers <-> text that people read."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from fractions import Fraction

from gpt2lab.errors import printable


def num_bytes(number: float) -> str:
    """Write bytes in powers of 1000: 1_493_712_000 -> '1.49 GB'."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:  # what rounds to 1000 of one unit is 1 of the next
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def parse_count(text: str) -> int:
    """Read a whole number with an optional unit of thousands: '100M' -> 100_000_000, '2.5B', '4_096'.

    Raises: ValueError.
    """
    plain, units = text.replace("_", "").lower(), {"k": 3, "m": 6, "b": 9, "t": 12}
    # Fraction alone would also read 1/0, and 1e999999999 into all memory.
    found = re.fullmatch(r"([+-]?(?=\.?[0-9])[0-9]*\.?[0-9]*(?:e[+-]?[0-9]{1,2})?)([kmbt]?)", plain)
    if found and len(plain) <= 40:  # Python converts thousands of digits to no int and no float
        value = Fraction(found[1]) * 10 ** units.get(found[2], 0)
        if value.denominator == 1:
            return int(value)
    raise ValueError(f"{text[:40]!r} is not a whole number")


def parse_bytes(text: str) -> int:
    """Read a size as transformers writes it: '5GB' -> 5_000_000_000, '1.5MB', '300KB'.

    Raises: ValueError.
    """
    if text[-2:].upper() not in ("KB", "MB", "GB", "TB"):
        raise ValueError(f"{text!r} is not a size such as 5GB or 200MB")
    return parse_count(text[:-1].upper().replace("G", "B"))  # counts say B for 10^9


def number(value: float | None, layout: str = ".4f") -> str:
    """Write a number; None -> 'n/a'."""
    return "n/a" if value is None else format(value, layout)


def number_of(count: int, noun: str) -> str:
    """Format a count of things: `1 checkpoint`, `2,000 checkpoints`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def steps(first: int, last: int) -> str:
    """Name the steps from the first to the last: `step 9`, `steps 9 to 12`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def duration(seconds: float | None) -> str:
    """Write seconds in the two largest units: 18_120 -> '5h 02m'; None and infinite ones -> 'n/a'."""
    if seconds is None or not math.isfinite(seconds):
        return "n/a"
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // next_size:02d}{next_unit}"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def quoted(text: str) -> str:
    """Return the lines of a model's text behind bars, control characters as escape codes."""
    return "\n".join(f"  | {line}".rstrip() for line in printable(text, keep="\n").split("\n"))


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Write Unix seconds as local time: '2026-12-24 18:00'; 'never' beyond the calendar of the system."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "never"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns with two spaces between them; the first column left, the others right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table of Markdown."""
    head, *body = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return "\n".join([head, "|" + "---|" * len(header), *body])


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, flag: str = "") -> str:
    """Return `did you mean NAME?` for the known name that is closest to a word, `otherwise` if none is close."""
    close = closest(word, known)
    return otherwise if close is None else f"did you mean {flag}{close}?"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to a word, None if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def command_line(words: Sequence[str]) -> str:
    """Write words as one line of bash that means exactly them, with codes for what a terminal would not show."""
    return " ".join(word_of_bash(word) for word in words)


def word_of_bash(word: str) -> str:
    """Quote one word, or a path that is not UTF-8, for bash."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (
        c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c))
        for c in word.replace("\\", "\\\\").replace("'", "\\'")
    )
    return f"$'{''.join(shown)}'"


def parse_duration(text: str) -> float:
    """Read a time span as seconds: '12h', '30m', '1d12h', '45s', '12' (hours).

    Raises: ValueError.
    """
    plain = text.strip().lower().replace(" ", "")
    units = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"([0-9]*\.?[0-9]+)([dhms])", plain)
    is_sum = parts and "".join(number + unit for number, unit in parts) == plain
    seconds = sum(float(n) * units[u] for n, u in parts) if is_sum else 3600 * float(plain)
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a time span")
    return seconds


def count(number: float, *, digits: int = 3) -> str:
    """Write a large number with few digits: 124_475_904 -> '124M', 1e10 -> '10B'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * size:
            layout = f".{digits}g" if digits > 3 or number < 999.5 * size else ".0f"
            return f"{number / size:{layout}}{unit}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
