"""Replay steps of a run from one of its checkpoints, unchanged or with one thing changed.

gpt2lab replay latest --steps 190:200
gpt2lab replay latest --steps 190 --without_sample 3041
gpt2lab replay latest --steps 190:200 --max_lr 3e-4 --layers
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt2lab.commands.parser import parse_flags
from gpt2lab.commands.train import recipe_of
from gpt2lab.config.flags import RUN, argument, option, required
from gpt2lab.errors import ConfigError
from gpt2lab.runs.target import find_run


@dataclass(frozen=True)
class ReplayRun:
    """Replay steps of a run and compare them with its log; nothing is written to the run."""

    run: str = argument(RUN)
    steps: str = required("first and last step, such as 480:500, or one step")
    without_sample: tuple[int, ...] = option((), "leave these samples out of the loss")
    without_document: tuple[int, ...] = option((), "leave these documents out of the loss")
    max_lr: float | None = option(None, "replay with this peak learning rate")
    dtype: Literal["fp32", "bf16"] | None = option(None, "replay in this precision")
    layers: bool = option(False, "show the gradient norm of each layer")
    data_dir: tuple[str, ...] = option((), "where the run's data is now, if it was moved")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Replay and print; return 1 if an unchanged step is not as logged."""
    flags = parse_flags(ReplayRun, argv)
    steps = read_steps(flags.steps)
    run_dir = find_run(flags.run, flags.checkpoint_dir)
    from gpt2lab.lab.replay import Change, replay

    settings = {"max_lr": flags.max_lr, "dtype": flags.dtype}
    change = Change(
        frozenset(flags.without_sample),
        frozenset(flags.without_document),
        {name: value for name, value in settings.items() if value is not None},
    )
    found = replay(
        run_dir, recipe_of(run_dir), steps, change, layers=flags.layers, data_dir=flags.data_dir
    )
    print(json.dumps(found.as_json()) if flags.json else found.describe())
    return 0 if found.replay.departure is None else 1


def read_steps(text: str) -> range:
    """Read `480:500`, which includes both ends, or `490`.

    Raises: ConfigError.
    """
    match = re.fullmatch(r"([0-9]{1,12})(?::([0-9]{1,12}))?", text)
    if match is None:
        raise ConfigError(f"--steps {text}: give the first and last step, such as 480:500")
    first = int(match[1])
    last = int(match[2] or first)
    if not 1 <= first <= last:
        raise ConfigError(
            f"--steps {text}: steps count from 1, and the first may not be after the last"
        )
    return range(first, last + 1)
