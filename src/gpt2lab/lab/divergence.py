"""Where two runs part: by their logs, by the hashes of their checkpoints, and by tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.checkpoint.store import MODEL, OPTIM
from gpt2lab.config.schema import LENGTHS, Config
from gpt2lab.config.settings import policy_of
from gpt2lab.data.mixture import missing_folders, with_data_at
from gpt2lab.lab.replay import first_difference, settings_of
from gpt2lab.runs import history
from gpt2lab.runs.events import Event
from gpt2lab.runs.history import Log


@dataclass(frozen=True)
class Side:
    """One of two runs."""

    folder: Path
    log: Log
    data_dir: tuple[str, ...]  # of data that were moved

    def at(self, step: int) -> Event:
        """Return the event of a step that is known to be logged."""
        event = self.log.step(step)
        assert event is not None
        return event

    def settings(self, attempt: int) -> dict[str, Any]:
        """Return the settings of a start that can change its numbers; its length counts in steps."""
        found = settings_of(self.folder, self.log, attempt)
        begin = self.log.begin_of(attempt)
        length = {"max_steps": begin["max_steps"]} if begin else {}
        decides = {
            name: value
            for name, value in found.items()
            if name not in LENGTHS and policy_of(name, Config()) != "free"
        }
        return decides | length

    def environment(self, attempt: int) -> dict[str, Any] | None:
        """Return what a start ran on; None if that is no longer recorded."""
        record = history.record_of_start(self.folder, attempt)
        found: dict[str, Any] | None = record.get("environment")
        return found

    def checkpoints(self) -> dict[int, CheckpointInfo]:
        """Return the run's checkpoints by step; their bytes are not read."""
        return {info.step: info for info in catalog.list_checkpoints(self.folder)[0]}


def open_side(folder: Path, data_dir: tuple[str, ...]) -> Side:
    """Read a run's log. `data_dir`: where its data are, unless they are where they were.

    Raises: DataError, ConfigError if there is no such folder.
    """
    config = history.read_config(folder)
    if data_dir:
        with_data_at(config, data_dir)  # rejects a folder that does not exist, needed or not
    return Side(folder, history.read_log(folder), data_dir if missing_folders(config) else ())


def common_steps(a: Side, b: Side) -> Iterator[tuple[Event, Event]]:
    """Yield the events of the steps that both runs have logged, in order."""
    ours, theirs = a.log.current_steps(), b.log.current_steps()
    x, y = next(ours, None), next(theirs, None)
    while x is not None and y is not None:
        if x["step"] == y["step"]:
            yield x, y
            x, y = next(ours, None), next(theirs, None)
        elif x["step"] < y["step"]:
            x = next(ours, None)
        else:
            y = next(theirs, None)


def first_logged_difference(a: Side, b: Side) -> tuple[int | None, int]:
    """Return the first logged step that differs, None if none does, and how many were compared."""
    count = 0
    for x, y in common_steps(a, b):
        count += 1
        if first_difference(x, y) is not None:
            return int(x["step"]), count
    return None, count


def hashes_of(info: CheckpointInfo) -> tuple[str, str]:
    """Return the hashes of a checkpoint's weights and optimizer state, as its manifest has them."""
    files = info.manifest["files"]
    return files[MODEL]["sha256"], files[OPTIM]["sha256"]


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor in which two sets differ."""

    name: str
    count: int  # values that differ
    total: int
    index: tuple[int, ...]  # of the first that differs
    values: tuple[float, float]

    def describe(self) -> str:
        """Write it for people."""
        place = f" at {list(self.index)}" if self.index else ""
        return (
            f"{self.name}: {self.count:,} of {self.total:,} values differ, the first{place}: "
            f"{self.values[0]!r} and {self.values[1]!r}"
        )


def first_tensor(
    a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]
) -> TensorDifference | str | None:
    """Return the first tensor, by name, whose bits differ; its name alone where shapes or types do; None if none."""
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            return name
        bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)]
        other = (bits[0] != bits[1]).view(x.numel(), -1).any(dim=1).nonzero().flatten()
        if len(other):
            place = int(other[0])
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), x.shape))
            values = (x.reshape(-1)[place].item(), y.reshape(-1)[place].item())
            return TensorDifference(name, len(other), x.numel(), index, values)
    return None


def first_saved_tensor(a: CheckpointInfo, b: CheckpointInfo) -> TensorDifference | str | None:
    """Compare the weights, then the optimizer state, of two verified checkpoints."""
    for name in (MODEL, OPTIM):
        files = [safetensors.torch.load_file(info.path / name) for info in (a, b)]
        if (found := first_tensor(*files)) is not None:
            return found
    return None
