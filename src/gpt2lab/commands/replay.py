"""Look into single steps of runs: replay them, name the samples behind a spike, find where two runs part.

gpt2lab replay latest --steps 190:200
gpt2lab replay latest --steps 190 --without_sample 3041
gpt2lab replay latest --steps 190:200 --max_lr 3e-4 --layers
gpt2lab why-spike latest --step 190
gpt2lab why-spike latest
gpt2lab bisect run_a run_b
gpt2lab bisect run_a copies/run_a --json
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Literal

from gpt2lab.commands.parser import AmongRuns, WithJson, parse_flags
from gpt2lab.commands.train import recipe_of
from gpt2lab.config.flags import RUN, argument, option, required
from gpt2lab.errors import ConfigError
from gpt2lab.runs.target import find_run


@dataclass(frozen=True)
class ReplayRun(WithJson, AmongRuns):
    """Replay steps of a run and compare them with its log; nothing is written to the run."""

    run: str = argument(RUN)
    steps: str = required("first and last step, such as 480:500, or one step")
    without_sample: tuple[int, ...] = option((), "leave these samples out of the loss")
    without_document: tuple[int, ...] = option((), "leave these documents out of the loss")
    max_lr: float | None = option(None, "replay with this peak learning rate")
    dtype: Literal["fp32", "bf16", "fp16"] | None = option(None, "replay in this precision")
    layers: bool = option(False, "show the gradient norm of each layer")
    data_dir: tuple[str, ...] = option((), "where the run's data is now, if it was moved")


def main(argv: list[str]) -> int:
    """Replay and print; return 1 if an unchanged step is not as logged."""
    flags = parse_flags(ReplayRun, argv, name="gpt2lab replay")
    steps = read_steps(flags.steps)
    run_dir = find_run(flags.run, flags.checkpoint_dir)
    from gpt2lab.lab.replay import Change, replay
    from gpt2lab.lab.step_tokens import RecordedRun

    settings = {"max_lr": flags.max_lr, "dtype": flags.dtype}
    change = Change(
        frozenset(flags.without_sample),
        frozenset(flags.without_document),
        {name: value for name, value in settings.items() if value is not None},
    )
    run = RecordedRun(run_dir, recipe_of(run_dir), flags.data_dir)
    found = replay(run, steps, change, layers=flags.layers)
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


@dataclass(frozen=True)
class WhySpike(WithJson, AmongRuns):
    """Name the samples behind a spike of the loss or of the gradient norm, and show the step without them.

    Nothing is written to the run.
    """

    run: str = argument(RUN)
    step: int | None = option(None, "the step; default the largest spike in the log", least=1)
    worst: int = option(
        3,
        "number of worst samples to show; the step is also computed without each of them",
        least=1,
    )
    data_dir: tuple[str, ...] = option((), "where the run's data is now, if it was moved")


def why_spike(argv: list[str]) -> int:
    """Explain and print; return 1 if the previous steps could not be replayed as logged."""
    flags = parse_flags(WhySpike, argv, name="gpt2lab why-spike")
    run_dir = find_run(flags.run, flags.checkpoint_dir)
    from gpt2lab.lab.step_tokens import RecordedRun
    from gpt2lab.lab.why_spike import explain

    run = RecordedRun(run_dir, recipe_of(run_dir), flags.data_dir)
    found = explain(run, flags.step, worst=flags.worst)
    print(json.dumps(found.as_json()) if flags.json else found.describe())
    return 0 if found.departure is None else 1


@dataclass(frozen=True)
class Bisect(WithJson, AmongRuns):
    """Find the first difference of two runs in their records or, if those do not tell, in a replay.

    Exit code 0 if the runs are equal in all that was compared, 1 if they differ. Nothing is written to the runs.
    """

    a: str = argument(RUN)
    b: str = argument("the other")
    data_dir: tuple[str, ...] = option(
        (), "where moved data is now; a run whose data was not moved keeps reading it"
    )


def bisect(argv: list[str]) -> int:
    """Compare and print; return 1 if the runs differ."""
    flags = parse_flags(Bisect, argv, name="gpt2lab bisect")
    folders = [find_run(run, flags.checkpoint_dir) for run in (flags.a, flags.b)]
    from gpt2lab.lab import bisect as lab

    found = lab.bisect(
        *(lab.open_side(folder, recipe_of(folder), flags.data_dir) for folder in folders)
    )
    print(json.dumps(asdict(found)) if flags.json else found.describe())
    return 0 if found.step is None else 1
