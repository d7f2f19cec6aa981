"""Find the first step in which two runs differ, and the first thing in it that differs.

gpt2lab bisect run_a run_b
gpt2lab bisect run_a copies/run_a --json
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from gpt2lab.commands.parser import parse_flags
from gpt2lab.commands.train import recipe_of
from gpt2lab.config.flags import RUN, argument, option
from gpt2lab.runs.target import find_run


@dataclass(frozen=True)
class Bisect:
    """Find the first difference of two runs in their records or, if those do not tell, in a replay.

    Exit code 0 if the runs are equal in all that was compared, 1 if they differ. Nothing is written to the runs.
    """

    a: str = argument(RUN)
    b: str = argument("the other")
    data_dir: tuple[str, ...] = option(
        (), "where moved data is now; a run whose data was not moved keeps reading it"
    )
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Compare and print; return 1 if the runs differ."""
    flags = parse_flags(Bisect, argv)
    folders = [find_run(run, flags.checkpoint_dir) for run in (flags.a, flags.b)]
    from gpt2lab.lab.bisect import bisect, open_side

    found = bisect(*(open_side(folder, recipe_of(folder), flags.data_dir) for folder in folders))
    print(json.dumps(dataclasses.asdict(found)) if flags.json else found.describe())
    return 0 if found.step is None else 1
