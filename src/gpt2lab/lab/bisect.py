"""Where two runs first differ: by their logs, by the hashes of their checkpoints, by tensors, and by replays."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from gpt2lab import fmt
from gpt2lab.checkpoint import manifest
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.checkpoint.store import MODEL, OPTIM
from gpt2lab.config.schema import LENGTHS, Config
from gpt2lab.config.settings import policy_of
from gpt2lab.data.mixture import missing_folders
from gpt2lab.errors import GPT2LabError
from gpt2lab.lab.replay import QUANTITIES, Replay, first_difference, open_replay, other_values
from gpt2lab.lab.step_tokens import RecordedRun, tokens_of_step
from gpt2lab.runs.events import Event
from gpt2lab.training.recipe import Recipe


def open_side(folder: Path, recipe: Recipe, data_dir: tuple[str, ...]) -> RecordedRun:
    """Read a run's log. `data_dir`: where its data is, if it was moved.

    Raises: DataError, ConfigError if there is no such folder; GPT2LabError if the run has no step.
    """
    run = RecordedRun(folder, recipe, data_dir)
    if data_dir:
        run.with_data(run.config)  # rejects a folder that does not exist, needed or not
    if not len(run.log.numbers):
        raise GPT2LabError(f"{run.name}: has no step to compare")
    return run if missing_folders(run.config) else RecordedRun(folder, recipe)


def _at(run: RecordedRun, step: int) -> Event:
    """Return the event of a step that is known to be logged."""
    event = run.log.step(step)
    assert event is not None
    return event


def _settings(run: RecordedRun, attempt: int) -> dict[str, Any]:
    """Return the settings of a start that its numbers depend on; its length is in steps."""
    begin = run.log.begin_of(attempt)
    decides = {
        name: value
        for name, value in run.settings(attempt).items()
        if name not in LENGTHS and policy_of(name, Config()) != "free"
    }
    return decides | ({"max_steps": begin["max_steps"]} if begin else {})


def first_logged_difference(a: RecordedRun, b: RecordedRun) -> tuple[int | None, int]:
    """Return the first logged step that differs, None if none does, and how many were compared."""
    shared = set(np.intersect1d(a.log.numbers, b.log.numbers).tolist())
    events = ((e for e in side.log.current_steps() if e["step"] in shared) for side in (a, b))
    for count, (x, y) in enumerate(zip(*events, strict=True), start=1):
        if first_difference(x, y) is not None:
            return int(x["step"]), count
    return None, len(shared)


def first_tensor(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> str | None:
    """Describe the first tensor, by name, whose bits differ; only its name if shapes or types do; None if none."""
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            return name
        bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)]
        other = (bits[0] != bits[1]).view(x.numel(), -1).any(dim=1).nonzero().flatten()
        if len(other):
            first = int(other[0])
            index = [int(i) for i in torch.unravel_index(torch.tensor(first), x.shape)]
            values = " and ".join(repr(t.reshape(-1)[first].item()) for t in (x, y))
            place = f" at {index}" if index else ""
            return (
                f"{name}: {len(other):,} of {x.numel():,} values differ, the first{place}: {values}"
            )
    return None


def first_saved_tensor(a: CheckpointInfo, b: CheckpointInfo) -> str | None:
    """Compare the weights, then the optimizer state, of two verified checkpoints, as `first_tensor`."""
    for name in (MODEL, OPTIM):
        files = [safetensors.torch.load_file(info.path / name) for info in (a, b)]
        if (found := first_tensor(*files)) is not None:
            return found
    return None


@dataclass(frozen=True)
class Finding:
    """The first difference of two runs."""

    a: str
    b: str
    step: int | None  # None: no difference was found
    # The first of setting, environment, batch, learning rate, loss, gradient norm, update, tensor.
    quantity: str | None
    differences: list[tuple[str, str]]  # all of that step: quantity, values in both runs
    conclusion: list[str]  # of replays
    compared: str
    notes: list[str]  # other differences
    replays: int

    def describe(self) -> str:
        """Format the finding."""
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


def bisect(a: RecordedRun, b: RecordedRun) -> Finding:
    """Compare records, then hashes of checkpoints, then tensors; replay only if these do not tell.

    Raises: CheckpointError naming a checkpoint of both runs that is damaged; GPT2LabError if they share no step.
    """
    logged, count = first_logged_difference(a, b)
    if not count:
        raise GPT2LabError("no step is in the logs of both runs")
    shared = sorted(a.checkpoints.keys() & b.checkpoints.keys())
    both = [saved for saved in shared if logged is None or saved < logged]
    unequal = next((saved for saved in both if not _is_equal(a, b, saved)), None)
    read = len(both) if unequal is None else both.index(unequal) + 1
    detail = "every byte of weights and optimizer state"
    if not read:
        detail = "they share none" + (f" before step {logged}" if logged is not None else "")
    compared = (
        f"{fmt.number_of(count, 'step')} (batch, learning rate, loss, gradient norm, update), "
        f"{fmt.number_of(read, 'checkpoint')} of both ({detail})"
    )
    step = logged if unequal is None else unequal
    in_both = np.intersect1d(a.log.numbers, b.log.numbers)
    names = (a.name, b.name)
    if step is not None and step not in in_both:
        found = first_saved_tensor(a.checkpoints[step], b.checkpoints[step])
        differences = [("tensor", found or "none differs")]
        why = f"step {step} is not in the logs of both runs, as that of weights that were imported"
        return Finding(*names, step, "tensor", differences, [why], compared, [], 0)
    last = int(in_both[-1]) if step is None else step
    x, y = _at(a, last), _at(b, last)
    differences, notes = _compare_starts(a, b, x, y)
    if step is None:
        compared += f", settings and environment of step {last}"
        notes += [f"different, without effect so far: {line}" for _, line in differences]
        return Finding(*names, None, None, [], [], compared, notes, 0)
    for name, key in QUANTITIES:
        if x.get(key) != y.get(key):
            text = f"{x.get(key)} and {y.get(key)}"
            if name == "batch":
                text = _first_other_sample(a, b, step)
            differences.append((name, text))
    said, replays = list[str](), 0
    if unequal is not None:
        found = first_saved_tensor(a.checkpoints[step], b.checkpoints[step])
        differences.append(("tensor", found or "none differs"))
        if logged is not None:
            said.append(f"their logs differ from step {logged} on")
    elif differences[0][0] in ("loss", "gradient norm", "update"):
        later = next((saved for saved in shared if saved >= step and _is_equal(a, b, saved)), None)
        if later is not None:
            equal = f"their checkpoints of step {later} are equal, every byte"
            said.append(f"{equal}: only the logs differ")
        else:
            said, found, replays = _tell_by_replay(a, b, step, max(both, default=None))
            differences += [("tensor", f"before the update, {found}")] if found else []
    return Finding(*names, step, differences[0][0], differences, said, compared, notes, replays)


def _is_equal(a: RecordedRun, b: RecordedRun, step: int) -> bool:
    """Return whether two checkpoints have the same bytes, which are verified."""
    infos = a.checkpoints[step], b.checkpoints[step]
    for info in infos:
        manifest.verify(info.path)
    ours, theirs = ([info.manifest["files"][f]["sha256"] for f in (MODEL, OPTIM)] for info in infos)
    return ours == theirs


def _compare_starts(
    a: RecordedRun, b: RecordedRun, x: Event, y: Event
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return how settings and environment differ at events `x` and `y` of a step, and notes on other differences."""
    settings = other_values(_settings(a, x["attempt"]), _settings(b, y["attempt"]), "and")
    records = a.record(x["attempt"]), b.record(y["attempt"])
    here, there = (record.get("environment") for record in records)
    notes = []
    if (ends := (int(a.log.numbers[-1]), int(b.log.numbers[-1])))[0] != ends[1]:
        notes.append(f"A has steps up to {ends[0]}, B up to {ends[1]}")
    ours, theirs = (record.get("provenance", {}) | {"command": None} for record in records)
    if len(ours) == len(theirs) and (other := other_values(ours, theirs, "and")):
        notes.append(f"other versions: {', '.join(other)}")
    differences = [("setting", line) for line in settings]
    if here and there:
        differences += [("environment", line) for line in other_values(here, there, "and")]
    else:
        notes.append("the environment of one run is not recorded any more, so it was not compared")
    return differences, notes


def _first_other_sample(a: RecordedRun, b: RecordedRun, step: int) -> str:
    """Return the first sample in which the batches of a step differ, by reading the data of both runs again."""
    hashes = " and ".join(_at(side, step)["batch_hash"][:12] for side in (a, b))
    try:
        ours, theirs = (tokens_of_step(side, step) for side in (a, b))
    except GPT2LabError as error:
        return f"hashes {hashes}; the sample is unknown: {error}"
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


def _tell_by_replay(
    a: RecordedRun, b: RecordedRun, step: int, equal: int | None
) -> tuple[list[str], str | None, int]:
    """Replay a step; return which log it agrees with, the first tensor that differs before it, and the replays.

    `equal`: the newest common checkpoint before the step.
    """
    sides = {"A": a, "B": b}
    todo = [name for name, side in sides.items() if any(s < step for s in side.checkpoints)]
    if not todo:
        return ["no checkpoint before this step is left to replay it from"], None, 0
    if equal is not None:
        todo = todo[:1]  # from equal checkpoints both replays would be the same
    weights: list[dict[str, torch.Tensor]] = []
    said = []
    for name in todo:
        run = open_replay(sides[name], first=step if equal is None else equal + 1, last=step)
        run.take_until(step - 1)
        tensors = dict(run.components.model.named_parameters())
        weights.append({key: value.detach().clone() for key, value in tensors.items()})
        said += _conclude(sides, run, name, equal)
        run.close()
    tensor = first_tensor(*weights) if len(weights) == 2 else None
    if len(weights) == 2 and tensor is None:
        said.append(f"the weights of both replays before step {step} are equal")
    return said, tensor, len(todo)


def _conclude(
    sides: dict[str, RecordedRun], run: Replay, name: str, equal: int | None
) -> list[str]:
    begun = f"a replay of {name} from its checkpoint of step {run.from_step}"
    departed = run.departure
    event = run.take().event
    if departed is not None:
        other = ", ".join(run.other_environment()) or "nothing that is recorded"
        return [
            f"{begun} departs from its log in step {departed.step}: this environment is not the one "
            f"it was trained in ({other})"
        ]
    step = event["step"]
    agrees = [
        side
        for side in sides
        if first_difference(_at(sides[side], step), event, tolerance=run.tolerance) is None
    ]
    rest = [side for side in sides if side not in agrees]
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
        f"between its checkpoint of step {equal}, equal to that of {agrees[0]}, and step {step} something that is not "
        f"recorded changed {rest[0]}: its weights, its code or its hardware",
    ]
