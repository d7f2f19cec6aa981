"""Remove the damaged lines of a run's metrics.jsonl; the original stays beside it.

gpt2lab runs repair-log latest
gpt2lab runs repair-log checkpoints/gpt2-124m
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import RUN, argument, option
from gpt2lab.errors import ConfigError, SaveError, system_errors_as
from gpt2lab.files import regular, staged_file, sync_folder

_SHOWN = 20  # damaged lines


@dataclass(frozen=True)
class Repair:
    """Remove the damaged lines of a run's metrics.jsonl; the original stays beside it."""

    run: str = argument(RUN)
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Repair the log, and say what was removed."""
    flags = parse_flags(Repair, argv, name="gpt2lab runs repair-log")
    from gpt2lab.runs.events import METRICS
    from gpt2lab.runs.folder import RunFolder
    from gpt2lab.runs.target import find_run

    run_dir = find_run(flags.run, flags.checkpoint_dir)
    if not (run_dir / METRICS).is_file():
        raise ConfigError(f"{run_dir}: no {METRICS}; not the folder of a run")
    with contextlib.closing(RunFolder(run_dir)):  # rejected while a trainer writes there
        removed, original = remove_damaged_lines(run_dir / METRICS)
    shown = paths.display_path(run_dir / METRICS)
    for number, what in removed[:_SHOWN]:
        print(f"{shown} line {number:,}: {what}; removed")
    if len(removed) > _SHOWN:
        print(f"and {len(removed) - _SHOWN:,} more")
    if original is None:
        print(f"{shown}: no damaged line")
    else:
        print(
            f"{len(removed):,} damaged lines removed; the original is {paths.display_path(original)}"
        )
    return 0


def remove_damaged_lines(path: Path) -> tuple[list[tuple[int, str]], Path | None]:
    """Replace a log by its good lines, in one step; return what was removed, by line, and where the original is.

    Raises: SaveError if the folder does not take the new file; the log is then what it was.
    """
    from gpt2lab.runs.events import parse_line

    removed: list[tuple[int, str]] = []
    original = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    with (
        open(path, "rb", opener=regular) as log,
        system_errors_as(SaveError, path, what="cannot be repaired", fix="it is what it was"),
    ):
        with staged_file(path) as temporary:
            with open(temporary, "wb") as good:
                for number, line in enumerate(log, start=1):
                    try:
                        parse_line(line)
                        good.write(line.removesuffix(b"\n") + b"\n")
                    except ValueError as error:
                        removed.append((number, str(error)))
                good.flush()
                os.fsync(good.fileno())
            if not removed:
                return [], None
            os.link(path, original)  # before the rename: at no moment is there no log
            os.replace(temporary, path)
        sync_folder(path.parent)
    return removed, original
