"""Read what a run recorded: metrics.jsonl and the settings of the last start. No torch."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import read_settings
from gpt2lab.errors import ConfigError, GPT2LabError, NonFiniteError
from gpt2lab.files import (
    COUNT,
    NUMBER,
    OBJECT,
    STRING,
    TEXT,
    JsonFile,
    Rule,
    Rules,
    object_with,
    or_null,
    regular,
)
from gpt2lab.runs.events import COLUMNS, LIMIT, METRICS, Event, parse_line, read_line
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record

WARM_UP = 2  # first steps of a start: compiling, page faults, allocator

# Changed on a resume: other windows are measured.
DECIDES_VALIDATION = {"data", "val_tokens", "val_fraction"}
_NAMED_LINES = 3  # damaged lines that are named; the others are counted

# A step in memory: where its line begins in the log, and its numbers.
_ROW = np.dtype(
    [("place", "<u8"), ("attempt", "<u4"), ("step", "<u4"), *((name, "<f8") for name in COLUMNS)]
)
_pack = struct.Struct(f"<QII{len(COLUMNS)}d").pack
_values_of = operator.attrgetter("attempt", "step", *COLUMNS)


def _numbers(*names: str) -> Rule:
    words = f"an object with the numbers {', '.join(names)}"
    return or_null(object_with(dict.fromkeys(names, NUMBER), words))


# The keys that are read of a file: those that it must have, and those that it may have.
_FORMS: dict[str, tuple[Rules, ...]] = {
    "status.json": (
        {"state": TEXT, "step": COUNT},
        {"exit_code": or_null(NUMBER), "reason": or_null(STRING)},
    ),
    "run.json": (
        {},
        {"environment": OBJECT, "provenance": OBJECT, "initial_weights": or_null(OBJECT)},
    ),
    "estimate.json": (
        {},
        {
            "estimate": _numbers("estimated_hours", "low_hours", "high_hours"),
            "throughput": _numbers("value", "low", "high"),
            "memory": _numbers("total"),
            "loss": _numbers("value", "low", "high"),
            "actual": _numbers("hours"),
        },
    ),
}


def open_log(run_dir: Path) -> Log:
    """Read a run's log; its `problem` names damaged lines, which are left out.

    Raises: OSError.
    """
    path = run_dir / METRICS
    return Log(path if os.path.lexists(path) else b"")


def read_log(run_dir: Path) -> Log:
    """Read a run's log as `open_log` does, and warn of damaged lines, once a process.

    Raises: GPT2LabError if no line of it is an event; OSError.
    """
    log = open_log(run_dir)
    if log.problem and not log:
        raise GPT2LabError(log.problem)
    if log.problem:
        warn_once(log.problem)
    return log


@functools.cache
def warn_once(problem: str) -> None:
    """Print a warning, once a process."""
    print(f"warning: {problem}", file=sys.stderr)


def stall_of(event: Event) -> float | None:
    """Return the seconds for which an event stopped training; None if they were not measured."""
    return event.get("stall_seconds", event.get("seconds"))


class Log:
    """The events of a run: its steps as columns of numbers, all others as they were logged.

    Current are the steps that led to the newest weights: a start from step N (0 for a fresh one), or a rewind to it,
    drops earlier events after step N. A million steps take 100 MB; as dictionaries they would take 3.5 GB.
    """

    def __init__(self, log: Path | bytes) -> None:
        """Read a file, or lines that are in no file.

        Raises: OSError.
        """
        self._log = log
        self.events: list[Event] = []  # all but the steps, in order
        self._rows: list[int] = []  # of each, the steps logged before it
        self._damaged: list[str] = []  # the first lines that are, and what is wrong with them
        self._num_damaged = 0
        self._table = np.frombuffer(self._read(), _ROW)
        # Of all steps that were logged, in order.
        self.attempts, self.steps = self._of_all("attempt"), self._of_all("step")
        self.numbers, self._current = self._follow(self.steps)

    def _read(self) -> bytearray:
        """Return the rows of all steps; keep the other events, and name damaged lines."""
        rows, place = bytearray(), 0
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                try:
                    found = read_line(line)
                    if isinstance(found, dict):
                        self.events.append(found)
                        self._rows.append(len(rows) // _ROW.itemsize)
                    else:
                        rows += _pack(place, *_values_of(found))
                except ValueError as error:
                    if line.endswith(b"\n"):  # else the last one is torn, or being written
                        self._num_damaged += 1
                        if len(self._damaged) < _NAMED_LINES:
                            self._damaged.append(f"line {number:,}: {error}")
                place += len(line)
        return rows

    def _open(self) -> IO[bytes]:
        log = self._log
        return io.BytesIO(log) if isinstance(log, bytes) else open(log, "rb", opener=regular)

    def _of_all(self, name: str) -> np.ndarray:
        return self._table[name].copy()

    @functools.cached_property
    def problem(self) -> str | None:
        """What is damaged; None if nothing is."""
        if not self._damaged or isinstance(self._log, bytes):
            return None
        more = self._num_damaged - len(self._damaged)
        run = fmt.word_of_bash(paths.display_path(self._log.parent))
        return (
            f"{self._log} {'; '.join(self._damaged)}{f' and {more:,} more' if more else ''}: edited, or the disk "
            f"is damaged; left out, gpt2lab runs repair-log {run} removes it"
        )

    def __bool__(self) -> bool:
        return bool(self.events) or len(self.steps) > 0

    @property
    def last_begin(self) -> Event | None:
        """The event with which the last start began; None if it is lost."""
        return next(reversed(self.of_kind("begin")), None)

    def begin_of(self, attempt: int) -> Event | None:
        """Return the event with which a start began; None if it is lost."""
        return next((e for e in self.of_kind("begin") if e["attempt"] == attempt), None)

    @property
    def has_ended(self) -> bool:
        """Tell whether the run reached the last step of its last start; warnings may follow it."""
        begin = self.last_begin
        return begin is not None and begin["max_steps"] in self.current("done")

    @property
    def average_loss(self) -> float | None:
        """The validation loss of a complete run with the mean of its last weights; None without --average_tail."""
        last = (self.last_begin or {}).get("max_steps", 0)
        found: float | None = self.current("done").get(last, {}).get("val_loss_average")
        return found

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return all events of these kinds, other than steps, in order."""
        return [event for event in self.events if event["event"] in kinds]

    def current(self, kind: str) -> dict[int, Event]:
        """Return {step: event} of the current events of one kind other than steps."""
        by_step: dict[int, Event] = {}
        for event in self.events:
            if event["event"] in ("begin", "resume", "rewind"):
                by_step = {step: kept for step, kept in by_step.items() if step <= event["step"]}
            elif event["event"] == kind:
                by_step[event["step"]] = event
        return by_step

    def evals_of_data(self) -> list[Event]:
        """Return the current evaluations that have a loss, in order: those since their windows were changed last."""
        changes: list[int] = []
        for event in self.of_kind("begin", "resume", "rewind"):
            # A start belongs to the line of steps that it continues, and its changes go with it.
            kept = event["step"] + (event["event"] == "rewind")
            changes = [step for step in changes if step < kept]
            if DECIDES_VALIDATION & set(event.get("changes", ())):
                changes.append(event["step"])
        since, measured = max(changes, default=-1), self.current("eval").values()
        return [e for e in measured if e["val_loss"] is not None and e["step"] > since]

    def column(self, name: str) -> np.ndarray:
        """Return a field of the current steps, in the order of `numbers`; NaN where it is missing or null."""
        values = self._of_all(name)
        return values if len(self._current) == len(values) else values[self._current]

    def last_start(self, name: str) -> np.ndarray:
        """Return a field of all steps of the last start, in order."""
        return self._of_all(name)[self.attempts == self.last_attempt]

    def typical_rate(self) -> tuple[float | None, str]:
        """Return the median tokens/s of the last start's steps without its first two, and what it is of.

        Those compile; and starts before may have been on another machine.
        """
        rates = self.last_start("tokens_per_second")
        rates = rates[WARM_UP:] if len(rates) > WARM_UP else rates
        rates = rates[~np.isnan(rates)]
        of = "median step" + (" of the last start" if self.last_attempt > 1 else "")
        return (float(np.median(rates)), of) if len(rates) else (None, of)

    def peak_memory(self) -> int | None:
        """Return the peak memory of all steps that were ever logged, in bytes; None before the first."""
        known = self._of_all("peak_memory_bytes")
        known = known[~np.isnan(known)]
        return int(known.max()) if len(known) else None

    @functools.cached_property
    def last_attempt(self) -> int:
        """The number of starts that the run has had."""
        of_steps = int(self.attempts.max()) if len(self.attempts) else 0
        return max([of_steps, *(event["attempt"] for event in self.events)])

    def step(self, number: int) -> Event | None:
        """Return the event of a current step as it was logged, None if there is none.

        Raises: GPT2LabError if the log was changed meanwhile.
        """
        place = int(np.searchsorted(self.numbers, number))
        if place == len(self.numbers) or self.numbers[place] != number:
            return None
        with self._open() as file:
            return self._step_at(int(self._current[place]), file)

    def recorded_after(self, step: int) -> dict[str, Event]:
        """Return {kind: event} of the current events at exactly this step."""
        taken = self.step(step)
        found: dict[str, Event] = {} if taken is None else {"step": taken}
        kinds = dict.fromkeys(event["event"] for event in self.events)
        by_kind = ((kind, self.current(kind).get(step)) for kind in kinds)
        return found | {kind: event for kind, event in by_kind if event is not None}

    def first_step(self) -> Event | None:
        """Return the event of the first current step, None before it."""
        return self.step(int(self.numbers[0])) if len(self.numbers) else None

    def last_step(self) -> Event | None:
        """Return the event of the newest current step, None before the first."""
        return self.step(int(self.numbers[-1])) if len(self.numbers) else None

    def current_steps(self) -> Iterator[Event]:
        """Yield the events of all current steps in the order they were logged.

        Raises: GPT2LabError if the log was changed meanwhile.
        """
        with self._open() as file:
            for row in np.sort(self._current).tolist():
                yield self._step_at(row, file)

    def _step_at(self, row: int, file: IO[bytes]) -> Event:
        with contextlib.suppress(ValueError, OSError):
            file.seek(int(self._table["place"][row]))
            event = parse_line(file.readline())
            found = event["event"], event["attempt"], event["step"]
            if found == ("step", self.attempts[row], self.steps[row]):
                return event
        raise GPT2LabError(f"{self._log!s:.200}: changed while it was read; try again")

    def seconds_in_steps(self) -> float:
        """Return the seconds of all steps of all starts, as `spent_seconds`: also of those that were dropped."""
        return float(np.nansum(self._table["step_seconds"]))

    def spent_seconds(self) -> float:
        """Return the seconds that all starts took together, without the pauses between them."""
        last_rows = dict(zip(self.attempts.tolist(), range(len(self.attempts)), strict=True))
        spent: dict[int, float] = {}
        for attempt, row in last_rows.items():
            # elapsed_seconds counts from the beginning of the start.
            elapsed = float(self._table["elapsed_seconds"][row])
            spent[attempt] = elapsed if elapsed > 0 else float(self._table["step_seconds"][row])
        for row, event in zip(self._rows, self.events, strict=True):
            attempt = event["attempt"]
            if event["event"] != "done" and row > last_rows.get(attempt, -1):
                spent[attempt] = spent.get(attempt, 0.0) + (stall_of(event) or 0.0)
        return sum(spent.values())

    def seconds_before_first_step(self) -> float:
        """Return the seconds of the events of the last start before its first step."""
        rows = np.flatnonzero(self.attempts == self.last_attempt)
        return sum(
            event.get("seconds") or 0.0
            for row, event in zip(self._rows, self.events, strict=True)
            if event["attempt"] == self.last_attempt and len(rows) and row <= rows[0]
        )

    def _follow(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray | range]:
        """Return the numbers of the current steps, ascending, and of each its row."""
        is_current, end, limit = np.ones(len(steps), bool), len(steps), LIMIT
        for row, event in zip(reversed(self._rows), reversed(self.events), strict=True):
            if event["event"] in ("begin", "resume", "rewind"):
                is_current[row:end] = steps[row:end] <= limit
                end, limit = row, min(limit, event["step"])
        is_current[:end] = steps[:end] <= limit
        numbers = steps
        rows: np.ndarray | range = range(len(steps))
        if not is_current.all():
            rows = np.flatnonzero(is_current).astype(np.uint32)
            numbers = steps[rows]
        if (numbers[1:] <= numbers[:-1]).any():  # logged twice by one start: the later counts
            numbers, from_end = np.unique(numbers[::-1], return_index=True)
            rows = np.asarray(rows)[::-1][from_end]
        return numbers, rows


def read_config(run_dir: Path) -> Config:
    """Return the settings of the last start of a run.

    Raises: ConfigError if config.json is missing or not readable.
    """
    file = JsonFile(run_dir / "config.json", ConfigError)
    if not file.path.exists():
        raise file.rejected("no such file; is this the folder of a run?")
    values = file.read()
    try:
        return read_settings(values)
    except ConfigError as error:
        raise file.rejected(str(error)) from error


def read_tokenizer(run_dir: Path) -> Tokenizer | None:
    """Return the tokenizer of a run; GPT-2's if run.json names none (older versions), None if it is unknown.

    Raises: DataError if files of the tokenizer are missing or have another hash.
    """
    facts = read_json(run_dir / "run.json") or {}
    return of_record(facts.get("tokenizer", GPT2.record()), run_dir, "run.json")


def has_diverged(run_dir: Path) -> bool:
    """Tell whether a run ended because its loss or gradient was not finite."""
    status = read_json(run_dir / "status.json") or {}
    return bool(status.get("exit_code") == NonFiniteError.exit_code)


def deleted_newest(run_dir: Path, newest: CheckpointInfo | None) -> list[str]:
    """Return a line if the checkpoint that the last start ended with was deleted since; `newest`: of those left.

    A start that was killed leaves no such record.
    """
    status = read_json(run_dir / "status.json") or {}
    name = Path(str(status.get("checkpoint"))).name
    if (
        re.fullmatch("step_[0-9]{8,18}", name) is None
        or status["state"] == "running"
        or list(run_dir.glob(f"*{name}*"))
    ):
        return []
    if newest is not None and newest.step >= int(name.removeprefix("step_")):
        return []
    left = "no other is left" if newest is None else f"step {newest.step} is used"
    return [f"{run_dir}: its newest checkpoint, {name}, was deleted; {left}"]


def read_json(path: Path, required: Rules | None = None) -> dict[str, Any] | None:
    """Return the JSON object in a file of the run; None if it is missing or, with one warning, damaged.

    `required`: the keys that it must have, of a file whose name does not tell.
    """
    file = JsonFile(path, ConfigError)
    try:
        found = file.read()
        required, optional = _FORMS.get(path.name, (required or {}, {}))
        file.check(found, required, optional)
    except ConfigError as error:
        if os.path.lexists(path):
            warn_once(f"{error}; left out")
        return None
    return found
