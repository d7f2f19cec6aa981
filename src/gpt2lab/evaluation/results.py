"""Results of an evaluation, unit by unit, in a small file, so that two can be compared in pairs. No torch.

Also which windows of a validation split are measured, and which of their targets belong to which document.

A unit is an item of HellaSwag or of a task of lm-eval, or a document of the validation split. Comparing the same units
gives a smaller standard error than comparing two means, because a unit that is hard for one model is mostly hard for
the other too.
"""

import hashlib
import io
import itertools
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2lab.data.order import Order
from gpt2lab.errors import DataError
from gpt2lab.files import read_regular, replace_durably

Kind = Literal["validation", "hellaswag", "tasks"]
KINDS: tuple[Kind, ...] = ("validation", "hellaswag", "tasks")  # tasks: one file each
FORMAT = "gpt2lab-results/2"
# The first had validation windows of equal weight as units.
_FORMATS = ("gpt2lab-results/1", FORMAT)
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Results:
    """One evaluation: `per_unit` maps each metric to an (n,) array, `units` is what identifies the set."""

    kind: Kind
    units: dict[str, Any]  # two evaluations can be compared if these are equal
    per_unit: dict[str, np.ndarray]  # metric -> (n,) float64
    details: dict[str, np.ndarray]  # not compared
    step: int | None = None
    target: str | None = None  # the folder of the weights, in files of `evaluate --save`
    weights: np.ndarray | None = None  # (n,), such as a document's targets; default equal

    @property
    def n(self) -> int:
        """Count the units."""
        return len(next(iter(self.per_unit.values())))

    @property
    def strata(self) -> tuple[slice, ...]:
        """Return the units of each source of a mixture, which follow one another; () without one.

        Files name the sources' weights alone; the units of a source add up to its weight.
        """
        if self.weights is None or len(of_sources := self.units.get("weights", ())) < 2:
            return ()
        reached = np.cumsum(self.weights / self.weights.sum())
        # Half of a unit's weight forward, because sums are rounded.
        middles = reached - self.weights / self.weights.sum() / 2
        ends = np.searchsorted(middles, np.cumsum(of_sources) / sum(of_sources)).tolist()
        return tuple(slice(*ends_of) for ends_of in itertools.pairwise((0, *ends)))

    @property
    def unit(self) -> str:
        """Name the unit; files of earlier versions do not record it, and their units are windows."""
        if self.kind != "validation":
            return "item"
        return str(self.units.get("unit", "conversation" if "answers" in self.units else "window"))


def file_of_step(run_dir: Path, kind: Kind, step: int) -> Path:
    """Name the file in which a run keeps one evaluation."""
    return run_dir / kind / f"step_{step:08d}.npz"


def write_results(path: Path, results: Results) -> None:
    """Write the file in one step, replacing an older one.

    Raises: OSError.
    """
    head = {
        "format": FORMAT,
        "kind": results.kind,
        "units": results.units,
        "step": results.step,
        "target": results.target,
        "metrics": list(results.per_unit),
    }
    arrays: dict[str, Any] = {**results.per_unit, **results.details}
    if results.weights is not None:
        arrays["weights"] = results.weights
    content = io.BytesIO()
    np.savez_compressed(content, head=np.array(json.dumps(head)), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, content.getvalue())


def read_results(path: Path) -> Results:
    """Read one evaluation.

    Raises: DataError naming the file.
    """
    try:
        content = io.BytesIO(read_regular(path, at_most=_MOST_BYTES, follow=True))
        if sum(one.file_size for one in zipfile.ZipFile(content).infolist()) > _MOST_BYTES:
            raise ValueError(f"over {_MOST_BYTES} bytes unpacked")
        with np.load(content, allow_pickle=False) as file:
            arrays = dict(file)
        head = json.loads(str(arrays.pop("head")))
        if head["format"] not in _FORMATS:
            raise DataError(f"{path}: format {head['format']!r}, this version reads {FORMAT!r}")
        per_unit = {name: arrays.pop(name) for name in head["metrics"]}
        weights = arrays.pop("weights", None)
        target = head.get("target")  # None in files of earlier versions
        return Results(head["kind"], head["units"], per_unit, arrays, head["step"], target, weights)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not evaluation results of gpt2lab ({error})") from error


def choose_windows(order: Order, wanted: int) -> np.ndarray:
    """Return the numbers of `wanted` windows spread evenly over the split, (N,) int64; all of a smaller split."""
    total = order.windows_per_epoch
    chosen = min(total, wanted)
    return np.arange(chosen, dtype=np.int64) * total // chosen


def checksums_of(windows: np.ndarray) -> np.ndarray:
    """Return a checksum of the ids of each window, (N, T + 1) -> (N,)."""
    return np.array([zlib.crc32(window.tobytes()) for window in windows], dtype=np.uint32)


def hash_checksums(checksums: np.ndarray) -> str:
    """Return 64 hex digits that identify the measured windows, from the checksums of all of them."""
    return hashlib.sha256(checksums.astype("<u4").tobytes()).hexdigest()


@dataclass(frozen=True)
class Parts:
    """The windows' targets, divided where a document ends: part p is targets [begin, end) of window `window[p]`.

    All arrays are (P,), ordered by window and place.
    """

    kind: Literal["document", "window"]
    window: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    unit: np.ndarray  # the document, or the window itself; numbered 0 to U - 1

    def fill(self, nats: np.ndarray, windows: np.ndarray, losses: np.ndarray) -> None:
        """Write the sums of some windows' losses, (len(windows), T), to their places in `nats`, (P,)."""
        for row, window in enumerate(windows.tolist()):
            first, last = np.searchsorted(self.window, [window, window + 1])
            nats[first:last] = np.add.reduceat(losses[row], self.begin[first:last])

    def by_unit(self, nats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return nats and targets of each unit, both (U,)."""
        targets = np.bincount(self.unit, weights=self.end - self.begin)
        return np.bincount(self.unit, weights=nats), targets


def divide_windows(order: Order, samples: np.ndarray, ends: list[np.ndarray]) -> Parts:
    """Return the parts of some windows, given the places of <|endoftext|>, or of documents' last tokens, in each shard.

    Before or after a document, <|endoftext|> as a target belongs to the document that it ends.
    """
    shards, offsets = order.locate(samples)
    T, count = order.context_length, len(samples)
    # A document may continue in the next shard: documents are numbered through all of them.
    before = np.cumsum([0, *map(len, ends)]).tolist()
    parts: list[tuple[int, int, int, int]] = []  # window, begin, end, document
    for window, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
        places = ends[shard]
        first, last = np.searchsorted(places, [offset + 1, offset + T])
        # A target's index is its place - offset - 1.
        cuts = [0, *(places[first:last] - offset).tolist(), T]
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            parts.append((window, begin, end, before[shard] + int(first) + number))
    windows, begins, finishes, documents = np.array(parts, dtype=np.int64).T
    distinct, units = np.unique(documents, return_inverse=True)
    if len(distinct) < 2:  # also where nothing marks them
        every = np.arange(count)
        return Parts("window", every, np.zeros(count, np.int64), np.full(count, T), every)
    return Parts("document", windows, begins, finishes, units)
