"""Find the first step in which two runs differ, and the first thing in it that differs.

gpt2lab bisect run_a run_b
gpt2lab bisect run_a copies/run_a --json
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.commands.replay import open_run
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import GPT2LabError

if TYPE_CHECKING:
    from gpt2lab.lab.divergence import Side
    from gpt2lab.runs.events import Event


@dataclass(frozen=True)
class Bisect:
    """Find the first difference of two runs in their records, and where those do not tell, in a replay.

    Exit code 0 if the runs are equal in all that was compared, 1 if they differ. Nothing of the runs is written.
    """

    a: str = argument("name of a run in checkpoints/, or its folder")
    b: str = argument("the other")
    data_dir: tuple[str, ...] = option(
        (),
        "where the data are now that were moved; a run whose data are where they were keeps them",
    )
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Compare and print; return 1 if the runs differ."""
    flags = parse_flags(Bisect, argv)
    from gpt2lab.runs import history

    folders = [
        history.find_run(run, checkpoint_dir=flags.checkpoint_dir) for run in (flags.a, flags.b)
    ]
    found = bisect(*folders, data_dir=flags.data_dir)
    print(json.dumps(dataclasses.asdict(found)) if flags.json else found.describe())
    return 0 if found.step is None else 1


@dataclass(frozen=True)
class Finding:
    """The first difference of two runs."""

    a: str
    b: str
    step: int | None  # None: no difference was found
    # The first of setting, environment, batch, learning rate, loss, gradient norm, update, tensor.
    quantity: str | None
    differences: list[tuple[str, str]]  # all of that step: the quantity, and what it is in both
    conclusion: list[str]  # of replays
    compared: str
    notes: list[str]  # what differs otherwise
    replays: int

    def describe(self) -> str:
        """Write it for people."""
        lines = [f"A: {self.a}", f"B: {self.b}"]
        if self.step is None:
            lines.append(f"equal: {self.compared}")
        else:
            lines.append(f"the first difference is in step {self.step}: {self.quantity}")
            lines += [f"  {name}: {text}" for name, text in self.differences]
            lines += self.conclusion
            lines.append(f"compared: {self.compared}")
        lines += self.notes
        return "\n".join([*lines, fmt.number_of(self.replays, "replay")])


def bisect(folder_a: Path, folder_b: Path, *, data_dir: tuple[str, ...] = ()) -> Finding:
    """Compare records, then hashes of checkpoints, then tensors; replay only where these do not tell.

    Raises: CheckpointError naming a checkpoint of both runs that is damaged.
    """
    from gpt2lab.checkpoint import manifest
    from gpt2lab.lab import divergence
    from gpt2lab.lab.replay import QUANTITIES, other_values

    a, b = (divergence.open_side(folder, data_dir) for folder in (folder_a, folder_b))
    for side in (a, b):
        if not len(side.log.numbers):
            raise GPT2LabError(f"{paths.display_path(side.folder)}: has taken no step to compare")
    logged, count = divergence.first_logged_difference(a, b)
    if not count:
        raise GPT2LabError("no step is in the logs of both runs")
    ours, theirs = a.checkpoints(), b.checkpoints()
    shared = sorted(ours.keys() & theirs.keys())

    def equal_at(saved: int) -> bool:
        for info in (ours[saved], theirs[saved]):
            manifest.verify(info.path)
        return divergence.hashes_of(ours[saved]) == divergence.hashes_of(theirs[saved])

    both = [saved for saved in shared if logged is None or saved < logged]
    unequal = next((saved for saved in both if not equal_at(saved)), None)
    read = len(both) if unequal is None else both.index(unequal) + 1
    detail = "every byte of weights and optimizer state"
    if not read:
        detail = "they share none" + (f" before step {logged}" if logged is not None else "")
    compared = (
        f"{fmt.number_of(count, 'step')} (batch, learning rate, loss, gradient norm, update), "
        f"{fmt.number_of(read, 'checkpoint')} of both ({detail})"
    )
    step = logged if unequal is None else unequal
    last = int(min(a.log.numbers[-1], b.log.numbers[-1])) if step is None else step
    x, y = a.at(last), b.at(last)
    settings = other_values(a.settings(x["attempt"]), b.settings(y["attempt"]), "and")
    here, there = a.environment(x["attempt"]), b.environment(y["attempt"])
    unlike = other_values(here, there, "and") if here and there else []
    notes = _notes(a, b, x, y)
    if not (here and there):
        notes.append(
            "the environment of one run is no longer recorded, so environments were not compared"
        )
    names = (paths.display_path(a.folder), paths.display_path(b.folder))
    if step is None:
        compared += f", settings and environment of step {last}"
        notes += [f"different, without effect so far: {line}" for line in (*settings, *unlike)]
        return Finding(*names, None, None, [], [], compared, notes, 0)
    found = [*(("setting", line) for line in settings), *(("environment", line) for line in unlike)]
    for name, field in QUANTITIES:
        if x.get(field) != y.get(field):
            text = _batch(a, b, step) if name == "batch" else f"{x.get(field)} and {y.get(field)}"
            found.append((name, text))
    conclusion, replays = [], 0
    if unequal is not None:
        found.append(("tensor", _named(divergence.first_saved_tensor(ours[step], theirs[step]))))
        if logged is not None:
            conclusion.append(f"their logs differ from step {logged} on")
    elif found[0][0] in ("loss", "gradient norm", "update"):
        later = next((saved for saved in shared if saved >= step and equal_at(saved)), None)
        if later is None:
            tensor, conclusion, replays = _replay(a, b, step, max(both, default=None))
            found += [] if tensor is None else [("tensor", tensor)]
        else:
            conclusion = [
                f"their checkpoints of step {later} are equal, every byte: only the logs differ"
            ]
    return Finding(*names, step, found[0][0], found, conclusion, compared, notes, replays)


def _named(found: Any) -> str:
    return found if isinstance(found, str) else found.describe() if found else "none differs"


def _notes(a: Side, b: Side, x: Event, y: Event) -> list[str]:
    """Name versions of code that differ, and steps that one run alone has."""
    from gpt2lab.lab.replay import other_values
    from gpt2lab.runs.history import record_of_start

    notes = []
    if (ends := (int(a.log.numbers[-1]), int(b.log.numbers[-1])))[0] != ends[1]:
        notes.append(f"A has steps up to {ends[0]}, B up to {ends[1]}")
    ours, theirs = (
        record_of_start(side.folder, event["attempt"]).get("provenance", {}) | {"command": None}
        for side, event in ((a, x), (b, y))
    )
    if len(ours) == len(theirs) and (other := other_values(ours, theirs, "and")):
        notes.append(f"other versions: {', '.join(other)}")
    return notes


def _batch(a: Side, b: Side, step: int) -> str:
    """Name the first sample in which the batches of a step differ, read again from the data of both runs."""
    import numpy as np

    from gpt2lab.commands.data_show import tokens_of_step

    hashes = " and ".join(side.at(step)["batch_hash"][:12] for side in (a, b))
    try:
        ours, theirs = (tokens_of_step(side.folder, step, side.data_dir) for side in (a, b))
    except GPT2LabError as error:
        return f"hashes {hashes}; which sample is not known: {error}"
    if ours.windows.shape != theirs.windows.shape:
        return f"hashes {hashes}: {ours.windows.shape} and {theirs.windows.shape} tokens"
    unlike = ours.windows != theirs.windows
    rows = np.flatnonzero(unlike.any(axis=1))
    row = int(rows[0])
    columns = np.flatnonzero(unlike[row])
    said = (
        f"{len(rows)} of {len(unlike)} samples differ, the first is sample {ours.first_sample + row:,}: "
        f"{len(columns)} of its {unlike.shape[1]} tokens, the first is number {columns[0]} from 0"
    )
    for name, tokens in (("A", ours), ("B", theirs)):
        documents = tokens.documents()
        which = ""
        if documents:
            number = documents[row][max(0, int(columns[0]) - 1)]
            which = f", document {number:,}"
        said += f"; {name} {tokens.places[row]}{which}"
    return said


def _replay(a: Side, b: Side, step: int, equal: int | None) -> tuple[str | None, list[str], int]:
    """Say which of two logs a replay agrees with; `equal`: the newest step before whose checkpoint both have.

    Returns: the first tensor that differs before the step, if that is known; what to conclude; the count of replays.
    """
    from gpt2lab.lab.divergence import first_tensor

    sides = {"A": a, "B": b}
    todo = [name for name, side in sides.items() if any(s < step for s in side.checkpoints())]
    if not todo:
        return None, ["no checkpoint before this step is left to replay it from"], 0
    if equal is not None:
        todo = todo[:1]  # from equal checkpoints both would go the same way
    weights: list[dict[str, Any]] = []
    said = []
    for name in todo:
        side = sides[name]
        steps = range(step if equal is None else equal + 1, step + 1)
        run = open_run(side.folder, steps, side.data_dir)
        run.take_until(step - 1)
        departed = run.departure
        tensors = dict(run.components.model.named_parameters())
        weights.append({key: value.detach().clone() for key, value in tensors.items()})
        taken = run.take()
        run.close()
        begun = f"a replay of {name} from its checkpoint of step {run.from_step}"
        if departed is not None:
            other = ", ".join(run.other_environment()) or "nothing that is recorded"
            said.append(
                f"{begun} departs from its log in step {departed[0].event['step']}: this environment is not the one "
                f"it was trained in ({other})"
            )
        else:
            said += _agreement(sides, taken.event, begun, equal, tolerance=run.tolerance)
    if len(weights) < 2:
        return None, said, len(todo)
    tensor = first_tensor(*weights)
    if tensor is None:
        return None, [*said, f"the weights of both replays before step {step} are equal"], len(todo)
    return f"before the update, {_named(tensor)}", said, len(todo)


def _agreement(
    sides: dict[str, Side],
    event: Event,
    begun: str,
    equal: int | None,
    *,
    tolerance: dict[str, float] | None,
) -> list[str]:
    """Say with which logs a replayed step agrees."""
    from gpt2lab.lab.replay import first_difference

    step = event["step"]
    agrees = [
        name
        for name, side in sides.items()
        if first_difference(side.at(step), event, tolerance=tolerance) is None
    ]
    rest = [name for name in sides if name not in agrees]
    if not agrees:
        return [f"{begun} agrees with neither log in step {step}"]
    said = f"{begun} agrees with the log of {' and '.join(agrees)} in step {step}"
    if not rest:
        return [said]
    said += f", so {rest[0]} is the one that went wrong"
    if equal is None:
        return [said]
    return [
        said,
        f"between its checkpoint of step {equal}, equal to that of {agrees[0]}, and step {step} something changed "
        f"{rest[0]} that no record shows: its weights, its code or its hardware",
    ]
