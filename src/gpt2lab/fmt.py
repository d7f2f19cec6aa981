"""Numbers <-> text that people read."""

from __future__ import annotations

from collections.abc import Sequence


def num_bytes(number: float) -> str:
    """Write bytes in powers of 1000: 1_493_712_000 -> '1.49 GB'."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:  # what rounds to 1000 of one unit is 1 of the next
            return f"{number / size:.3g} {unit}"
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
