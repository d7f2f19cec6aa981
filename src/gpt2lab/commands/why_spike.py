"""Name the samples behind a spike of the loss or of the gradient norm, and show the step without them.

gpt2lab why-spike latest --step 190
gpt2lab why-spike latest
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gpt2lab.commands.parser import parse_flags
from gpt2lab.commands.train import recipe_of
from gpt2lab.config.flags import RUN, argument, option
from gpt2lab.runs.target import find_run


@dataclass(frozen=True)
class WhySpike:
    """Rank the samples of a step by their contribution to its gradient; nothing is written to the run."""

    run: str = argument(RUN)
    step: int | None = option(None, "the step; default the largest spike in the log", least=1)
    worst: int = option(
        3,
        "number of worst samples to show; the step is also computed without each of them",
        least=1,
    )
    data_dir: tuple[str, ...] = option((), "where the run's data is now, if it was moved")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Explain and print; return 1 if the previous steps could not be replayed as logged."""
    flags = parse_flags(WhySpike, argv)
    run_dir = find_run(flags.run, flags.checkpoint_dir)
    from gpt2lab.lab.why_spike import explain

    found = explain(
        run_dir, recipe_of(run_dir), flags.step, worst=flags.worst, data_dir=flags.data_dir
    )
    print(json.dumps(found.as_json()) if flags.json else found.describe())
    return 0 if found.departure is None else 1
