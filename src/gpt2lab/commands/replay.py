"""Replay steps of a run from one of its checkpoints, exactly as they were or with one thing changed.

gpt2lab replay my_run --steps 480:500
gpt2lab replay my_run --steps 490 --without_sample 31400
gpt2lab replay my_run --steps 490:500 --max_lr 3e-4 --layers
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option, required
from gpt2lab.errors import ConfigError
from gpt2lab.runs.console import say

if TYPE_CHECKING:
    from gpt2lab.lab.replay import Change, Replay, ReplayedStep


@dataclass(frozen=True)
class ReplayRun:
    """Replay steps of a run and compare them with its log; nothing is written into the run."""

    run: str = argument("name of a run in checkpoints/, or its folder")
    steps: str = required("first and last step, such as 480:500, or one step")
    without_sample: tuple[int, ...] = option((), "leave these samples out of the loss")
    without_document: tuple[int, ...] = option((), "leave these documents out of the loss")
    max_lr: float | None = option(None, "replay with this peak learning rate")
    dtype: Literal["fp32", "bf16"] | None = option(None, "replay in this precision")
    layers: bool = option(False, "show the gradient norm of each layer")
    data_dir: tuple[str, ...] = option((), "where the run's data are now, if they were moved")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Replay and print; return 1 if an unchanged step is not as it was logged."""
    flags = parse_flags(ReplayRun, argv)
    from gpt2lab.runs import history

    steps = read_steps(flags.steps)
    run_dir = history.find_run(flags.run, checkpoint_dir=flags.checkpoint_dir)
    from gpt2lab.lab.replay import Change

    change = Change(
        frozenset(flags.without_sample),
        frozenset(flags.without_document),
        flags.max_lr,
        flags.dtype,
    )
    found = replay(run_dir, steps, change, layers=flags.layers, data_dir=flags.data_dir)
    print(json.dumps(found.as_json()) if flags.json else found.describe())
    return 0 if found.departure is None else 1


def read_steps(text: str) -> range:
    """Read `480:500` or `490`, both ends counted.

    Raises: ConfigError.
    """
    match = re.fullmatch(r"([0-9]{1,12})(?::([0-9]{1,12}))?", text)
    if match is None:
        raise ConfigError(f"--steps {text}: give the first and last step, such as 480:500")
    first = int(match[1])
    last = int(match[2] or first)
    if not 1 <= first <= last:
        raise ConfigError(
            f"--steps {text}: steps count from 1, and the first is not after the last"
        )
    return range(first, last + 1)


@dataclass(frozen=True)
class Replayed:
    """What came of a replay."""

    run: Path
    from_step: int
    change: str | None
    shown: list[ReplayedStep]
    unchanged_layers: dict[int, dict[str, float | None]]  # of the same steps, taken as they were
    departure: tuple[ReplayedStep, str, str] | None  # of the steps that were taken as they were
    unlike: list[str]  # in the environment
    rounding: str | None  # why not every bit is compared
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        departure = None
        if self.departure is not None:
            step, name, field = self.departure
            departure = {
                "step": step.event["step"],
                "quantity": name,
                "logged": step.logged.get(field),
                "replayed": step.event[field],
            }
        return {
            "run": str(self.run),
            "from_step": self.from_step,
            "change": self.change,
            "compared": "rounding" if self.rounding else "bits",
            "departure": departure,
            "environment": self.unlike,
            "steps": [
                {
                    "step": step.event["step"],
                    "logged": {name: step.logged.get(name) for name in step.event},
                    "replayed": step.event,
                    "targets": step.num_targets,
                    "layers": step.layers,
                    "layers_unchanged": self.unchanged_layers.get(step.event["step"], {}),
                }
                for step in self.shown
            ],
        }

    def describe(self) -> str:
        """Write it for people."""
        first, last = self.shown[0].event["step"], self.shown[-1].event["step"]
        lines = [
            f"{paths.display_path(self.run)}, {fmt.steps(first, last)} from the checkpoint of step "
            f"{self.from_step}{f', {self.change}' if self.change else ''}",
            *self.notes,
        ]
        rows = [
            [
                str(step.event["step"]),
                *(
                    fmt.number(value, ".6f")
                    for name in ("loss", "grad_norm")
                    for value in (step.logged.get(name), step.event[name])
                ),
                f"{step.event['lr']:.4g}",
                f"{step.num_targets:,}",
            ]
            for step in self.shown
        ]
        header = ["step", "loss logged", "now", "norm logged", "now", "rate now", "targets"]
        lines.append(fmt.table(header, rows))
        for step in self.shown if self.shown[0].layers else []:
            as_was = self.unchanged_layers.get(step.event["step"])
            titles = ["layer", "norm as it was", "now"] if as_was else ["layer", "norm"]
            body = [
                [name, *(fmt.number(of[name], ".6f") for of in (as_was, step.layers) if of)]
                for name in step.layers
            ]
            lines += [f"step {step.event['step']}, gradient norm by layer", fmt.table(titles, body)]
        lines.append(self._verdict(first if self.change else last + 1))
        return "\n".join(lines)

    def _verdict(self, end: int) -> str:
        """Say whether the steps before `end`, which were taken as they were, are as logged."""
        begin = self.from_step + 1
        if self.departure is not None:
            step, name, field = self.departure
            why = f"; likely cause: {', '.join(self.unlike)}" if self.unlike else ""
            before, now = step.logged.get(field), step.event[field]
            return (
                f"not as logged: step {step.event['step']} is the first that differs, in its {name} "
                f"(logged {_short(before)}, now {_short(now)}){why}"
            )
        if begin == end:
            return "no step before the change was taken, so none was compared with the log"
        which = fmt.steps(begin, end - 1)
        if self.rounding is None:
            return f"{which}: batch, rate, loss and gradient norm are every bit as logged"
        return (
            f"{which}: the same batches and rates; losses to 1e-5 and gradient norms to 1e-4 as logged, because "
            f"{self.rounding}"
        )


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else repr(value)


def replay(
    run_dir: Path, steps: range, change: Change, *, layers: bool, data_dir: tuple[str, ...] = ()
) -> Replayed:
    """Take the steps before the change as they were, then those asked for with it."""
    described = change.describe()
    unchanged: dict[int, dict[str, float | None]] = {}
    if layers and described is not None:
        as_was = open_run(run_dir, steps, data_dir)
        taken = as_was.take_until(steps[-1], layers=True)
        unchanged = {step.event["step"]: step.layers for step in taken}
        as_was.close()
    again = open_run(run_dir, steps, data_dir)
    again.require(change, steps)
    before = steps[0] - 1 if described else steps[-1]
    taken = again.take_until(before, layers=layers)
    if described:
        again.apply(change)
        taken += again.take_until(steps[-1], change, layers=layers)
    again.close()
    return Replayed(
        run_dir,
        again.from_step,
        described,
        [step for step in taken if step.event["step"] in steps],
        {number: norms for number, norms in unchanged.items() if number in steps},
        again.departure,
        again.other_environment(),
        again.rounding,
        again.notes,
    )


def open_run(run_dir: Path, steps: range, data_dir: tuple[str, ...] = ()) -> Replay:
    """Load the newest checkpoint before the first of some steps, and say so on stderr."""
    from gpt2lab.commands.train import recipe_named
    from gpt2lab.lab.replay import open_replay
    from gpt2lab.runs import history

    is_tuned = history.read_config(run_dir).tuning.instructions is not None
    recipe = recipe_named("finetune" if is_tuned else "pretrain")
    again = open_replay(run_dir, recipe, first=steps[0], last=steps[-1], data_dir=data_dir)
    count = fmt.number_of(steps[-1] - again.from_step, "step")
    say(f"replaying {count} from the checkpoint of step {again.from_step}")
    return again
