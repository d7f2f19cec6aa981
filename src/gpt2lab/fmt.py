"""Numbers <-> text that people read."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: float) -> str:
    """Write a count with three significant digits: 124_475_904 -> '124M'."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:g}"


def num_bytes(number: float) -> str:
    """Write bytes in powers of 1000: 1_493_712_000 -> '1.49 GB'."""
    for limit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number) >= limit:
            return f"{number / limit:.3g} {suffix}"
    return f"{number:.0f} B"


def duration(seconds: float | None) -> str:
    """Write seconds in the two largest units: 18_120 -> '5h 02m'; None -> 'n/a'."""
    if seconds is None:
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns with two spaces between them; the first column left, the others right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
