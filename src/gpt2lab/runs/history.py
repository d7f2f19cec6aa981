"""Read what a run recorded: metrics.jsonl and the settings of the last start. No torch."""

from __future__ import annotations

import bisect
import contextlib
import difflib
import functools
import itertools
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.catalog import METRICS, find_folder, list_checkpoints, similar_run
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
)
from gpt2lab.runs import log_index
from gpt2lab.runs.events import LIMIT, Event, parse_line
from gpt2lab.runs.log_index import NAMED_LINES, Chunk
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record


def _numbers(*names: str) -> Rule:
    words = f"an object with the numbers {', '.join(names)}"
    return or_null(object_with(dict.fromkeys(names, NUMBER), words))


# What is read of a file: keys that it has, and that it may have.
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


def find_run(run: str, *, checkpoint_dir: Path | None = None) -> Path:
    """Return the folder of a run given by its name in the typed `checkpoint_dir`, default checkpoints/, or by a path.

    Raises: ConfigError if there is no such folder.
    """
    runs = paths.runs_folder(checkpoint_dir)
    folder = find_folder(run, runs)
    if folder is None:
        raise ConfigError(
            f"{run}: no run of this name in {paths.display_path(runs)}, and no such folder"
            f"{similar_run(run, runs)}"
        )
    return folder


def iter_events(run_dir: Path) -> Iterator[Event]:
    """Yield the run's events in order, damaged lines and an unterminated last line (a killed writer) left out."""
    path = run_dir / METRICS
    if not path.exists():
        return
    with open(path, "rb") as log:
        yield from _parsed(line for line in log if line.endswith(b"\n"))


def read_events(run_dir: Path) -> list[Event]:
    """Return all events of a short run, see `iter_events`; a long one has more than a memory should hold."""
    return list(iter_events(run_dir))


def newest_event(run_dir: Path) -> Event | None:
    """Return the last event of a run, None if there is none; reads the end of its log only.

    Raises: OSError.
    """
    path = run_dir / METRICS
    size, length = path.stat().st_size if path.exists() else 0, log_index.BLOCK
    while True:
        begin = max(0, size - length)
        lines = _read(path, begin, size).split(b"\n")[1 if begin else 0 : -1] if size else []
        newest = next(_parsed(reversed(lines)), None)
        if newest is not None or begin == 0:
            return newest
        length *= 2


def open_log(run_dir: Path) -> Log:
    """Return a run's log; its `problem` names damaged lines, which are left out.

    Raises: OSError.
    """
    return Log(run_dir, log_index.read_chunks(run_dir))


def read_log(run_dir: Path) -> Log:
    """Return a run's log, with a warning that names damaged lines, once a process.

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
    """Return the seconds for which training waited for what an event tells of; None if nobody measured them."""
    return event.get("stall_seconds", event.get("seconds"))


class Log:
    """The events of a run: all but its steps as they are, its steps as columns that are read when asked for.

    Current are the steps that led to the newest weights: a start from step N (0 for a fresh one), or a rewind to it,
    drops earlier events after step N.
    """

    def __init__(self, run_dir: Path | None, chunks: list[Chunk]) -> None:
        """`run_dir` is None for events that are in no file."""
        self._run_dir, self._chunks = run_dir, chunks
        self._starts = [0, *itertools.accumulate(chunk.rows for chunk in chunks)]
        self.events: list[Event] = []  # all but the steps, in order
        self._rows: list[int] = []  # of each, the steps logged before it
        for start, chunk in zip(self._starts, chunks, strict=False):
            self._rows += [start + row for row, _ in chunk.events]
            self.events += [event for _, event in chunk.events]
        self._attempts = self._read("attempt")
        self._steps = self._read("step")
        self.numbers, self._current = self._follow(self._steps)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Log:
        """Return the log of these events."""
        lines = "".join(json.dumps(event) + "\n" for event in events)
        return cls(None, [log_index.make_chunk(lines.encode(), 0)])

    @functools.cached_property
    def problem(self) -> str | None:
        """What is damaged; None if nothing is."""
        count = sum(chunk.num_damaged for chunk in self._chunks)
        if not count or self._run_dir is None:
            return None
        before = itertools.accumulate((chunk.lines for chunk in self._chunks), initial=0)
        named = [
            f"line {start + line:,}: {what}"
            for start, chunk in zip(before, self._chunks, strict=False)
            for line, what in chunk.damaged
        ]
        more = f" and {count - NAMED_LINES:,} more" if count > NAMED_LINES else ""
        run = fmt.word_of_bash(paths.display_path(self._run_dir))
        return (
            f"{self._run_dir / METRICS} {'; '.join(named[:NAMED_LINES])}{more}: edited, or the disk is damaged; "
            f"left out, {paths.command('repair-log')} {run} removes it"
        )

    def __bool__(self) -> bool:
        return bool(self.events) or self._starts[-1] > 0

    @property
    def last_begin(self) -> Event | None:
        """The event with which the last start began; None if it is lost."""
        return next(reversed(self.of_kind("begin")), None)

    def begin_of(self, attempt: int) -> Event | None:
        """Return the event with which a start began; None if it is lost."""
        return next((e for e in self.of_kind("begin") if e["attempt"] == attempt), None)

    @property
    def has_ended(self) -> bool:
        """Tell whether the run came to the end that its last start had; later lines may be warnings."""
        begin = self.last_begin
        return begin is not None and begin["max_steps"] in self.current("done")

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return all events of these kinds but steps, in order."""
        return [event for event in self.events if event["event"] in kinds]

    def current(self, kind: str) -> dict[int, Event]:
        """Return {step: event} of one kind but steps along the steps that led to the newest weights."""
        return current(self.events, kind)

    def column(self, name: str) -> np.ndarray:
        """Return a field of the current steps, in the order of `numbers`; NaN where it is missing or null."""
        values = self._read(name)
        return values if len(self._current) == len(values) else values[self._current]

    def last_start(self, name: str) -> np.ndarray:
        """Return a field of all steps of the last start, in order."""
        return self._read(name)[self._attempts == self.last_attempt]

    def farthest_step(self, attempt: int) -> int | None:
        """Return the highest number of a step that a start took, None if it took none."""
        taken = self._steps[self._attempts == attempt]
        return int(taken.max()) if len(taken) else None

    def peak_memory(self) -> int | None:
        """Return the largest memory of any step that was ever logged, bytes; None before the first."""
        known = self._read("peak_memory_bytes")
        known = known[~np.isnan(known)]
        return int(known.max()) if len(known) else None

    @functools.cached_property
    def last_attempt(self) -> int:
        """How many starts the run has had."""
        of_steps = int(self._attempts.max()) if len(self._attempts) else 0
        return max([of_steps, *(event["attempt"] for event in self.events)])

    def step(self, number: int) -> Event | None:
        """Return the event of a current step as it was logged, None if there is none.

        Raises: GPT2LabError if the log was changed meanwhile.
        """
        place = int(np.searchsorted(self.numbers, number))
        if place == len(self.numbers) or self.numbers[place] != number:
            return None
        row = int(self._current[place])
        chunk = bisect.bisect_right(self._starts, row) - 1
        steps = self._steps_of(chunk)
        return next(itertools.islice(steps, row - self._starts[chunk], None))

    def recorded_after(self, step: int) -> dict[str, Event]:
        """Return {kind: event} of exactly this step, along the steps that led to the newest weights."""
        taken = self.step(step)
        found: dict[str, Event] = {} if taken is None else {"step": taken}
        for event in self.events:
            if event["event"] in ("begin", "resume", "rewind"):
                found = (
                    found
                    if step <= event["step"]
                    else {k: v for k, v in found.items() if k == "step"}
                )
            elif event["step"] == step:
                found[event["event"]] = event
        return found

    def last_step(self) -> Event | None:
        """Return the event of the newest current step, None before the first."""
        return self.step(int(self.numbers[-1])) if len(self.numbers) else None

    def current_steps(self) -> Iterator[Event]:
        """Yield the events of all current steps in the order they were logged."""
        is_current = np.zeros(len(self._steps), bool)
        is_current[self._current] = True
        for number, start in enumerate(self._starts[:-1]):
            events = itertools.compress(self._steps_of(number), is_current[start:])
            yield from (event for event in events if event is not None)

    def spent_seconds(self) -> float:
        """Return the seconds of all starts, each from its beginning, without the pauses between them."""
        spent: dict[int, float] = {}
        last_row: dict[int, int] = {}
        is_last = np.ones(len(self._attempts), bool)
        is_last[:-1] = self._attempts[1:] != self._attempts[:-1]
        for row in np.flatnonzero(is_last).tolist():
            attempt = int(self._attempts[row])
            # The elapsed seconds of a step include everything before it in its start.
            elapsed = self._value("elapsed_seconds", row)
            spent[attempt] = elapsed if elapsed > 0 else self._value("step_seconds", row)
            last_row[attempt] = row
        for row, event in zip(self._rows, self.events, strict=True):
            attempt = event["attempt"]
            if event["event"] != "done" and row > last_row.get(attempt, -1):
                spent[attempt] = spent.get(attempt, 0.0) + (stall_of(event) or 0.0)
        return sum(spent.values())

    def seconds_before_first_step(self) -> float:
        """Return the seconds of the events of the last start before its first step."""
        rows = np.flatnonzero(self._attempts == self.last_attempt)
        return sum(
            event.get("seconds") or 0.0
            for row, event in zip(self._rows, self.events, strict=True)
            if event["attempt"] == self.last_attempt and len(rows) and row <= rows[0]
        )

    def _follow(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the current steps, ascending, and of each its row."""
        is_current, end, limit = np.ones(len(steps), bool), len(steps), LIMIT
        for row, event in zip(reversed(self._rows), reversed(self.events), strict=True):
            if event["event"] in ("begin", "resume", "rewind"):
                is_current[row:end] = steps[row:end] <= limit
                end, limit = row, min(limit, event["step"])
        is_current[:end] = steps[:end] <= limit
        if is_current.all():
            numbers, rows = steps, np.arange(len(steps), dtype=np.uint32)
        else:
            rows = np.flatnonzero(is_current).astype(np.uint32)
            numbers = steps[rows]
        if (numbers[1:] <= numbers[:-1]).any():  # twice without a start between: the later counts
            numbers, from_end = np.unique(numbers[::-1], return_index=True)
            rows = rows[::-1][from_end]
        return numbers, rows

    def _read(self, name: str) -> np.ndarray:
        """Return a column of all steps."""
        values = np.empty(self._starts[-1], log_index.dtype_of(name))
        with self._index() as index:
            for start, chunk in zip(self._starts, self._chunks, strict=False):
                values[start : start + chunk.rows] = self._column_of(chunk, name, index)
        return values

    def _value(self, name: str, row: int) -> float:
        chunk = bisect.bisect_right(self._starts, row) - 1
        with self._index() as index:
            column = self._column_of(self._chunks[chunk], name, index)
        return float(column[row - self._starts[chunk]])

    def _index(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        """Open the index; None where there is none, or none any more."""
        if self._run_dir is not None:
            with contextlib.suppress(OSError):
                return log_index.open_index(self._run_dir)
        return contextlib.nullcontext()

    def _column_of(self, chunk: Chunk, name: str, index: IO[bytes] | None) -> np.ndarray:
        try:
            if index is None and chunk.payload is None:
                raise FileNotFoundError(log_index.INDEX)
            return chunk.column(name, index)
        except (OSError, ValueError, zlib.error):  # the index is damaged, or was replaced since
            block = self._block(chunk)
            if zlib.crc32(block) != chunk.crc:
                raise self._error("changed while it was read; try again") from None
            again = log_index.make_chunk(block, chunk.first)
            if again.rows != chunk.rows:
                raise self._error("its index is not of it; delete metrics.index") from None
            return again.column(name, None)

    def _steps_of(self, number: int) -> Iterator[Event | None]:
        """Yield the events of all steps in a chunk, None for one that was damaged since it was indexed."""
        chunk, start = self._chunks[number], self._starts[number]
        block = self._block(chunk)
        steps = (e for e in _parsed(block.split(b"\n")[:-1]) if e["event"] == "step")
        if zlib.crc32(block) == chunk.crc:
            yield from steps
            return
        # A row of the index no longer finds its line by counting.
        rows = slice(start, start + chunk.rows)
        indexed = list(zip(self._attempts[rows].tolist(), self._steps[rows].tolist(), strict=True))
        left = list(steps)
        pairs = difflib.SequenceMatcher(
            None, indexed, [(event["attempt"], event["step"]) for event in left], autojunk=False
        )
        found: list[Event | None] = [None] * chunk.rows
        for row, line, length in pairs.get_matching_blocks():
            found[row : row + length] = left[line : line + length]
        if not any(found):
            raise self._error("changed while it was read; try again")
        damaged = log_index.make_chunk(block, chunk.first)
        before = sum(one.lines for one in self._chunks[:number])
        where = ", ".join(f"{before + line:,}" for line, _ in damaged.damaged)
        warn_once(
            f"{self._run_dir}/{METRICS}: damaged after it was written, near line {where}; left out"
        )
        yield from found

    def _block(self, chunk: Chunk) -> bytes:
        assert self._run_dir is not None
        return _read(self._run_dir / METRICS, chunk.first, chunk.end)

    def _error(self, what: str) -> GPT2LabError:
        return GPT2LabError(f"{self._run_dir}/{METRICS}: {what}")


def _read(path: Path, begin: int, end: int) -> bytes:
    with open(path, "rb") as log:
        log.seek(begin)
        return log.read(end - begin)


def _parsed(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield parse_line(line)


def read_config(run_dir: Path) -> Config:
    """Return the settings of a run's last start.

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
    """Return the tokenizer of a run; GPT-2's where run.json is older than other tokenizers, None for an unknown one.

    Raises: DataError if the tokenizer's files are missing or another's.
    """
    facts = read_json(run_dir / "run.json") or {}
    return of_record(facts.get("tokenizer", GPT2.record()), run_dir, "run.json")


def current(events: list[dict[str, Any]], kind: str) -> dict[int, dict[str, Any]]:
    """Return {step: event} of one kind along the steps that led to the newest weights.

    A start from step N (0 for a fresh one), or a rewind to it, drops earlier events after step N.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] in ("begin", "resume", "rewind"):
            by_step = {step: kept for step, kept in by_step.items() if step <= event["step"]}
        elif event["event"] == kind:
            by_step[event["step"]] = event
    return by_step


def has_completed(run_dir: Path, step: int) -> bool:
    """Tell whether a run came to its end at this step: its status is the last file that an end writes."""
    status = read_json(run_dir / "status.json") or {}
    return status.get("state") == "completed" and status.get("step") == step


def has_diverged(run_dir: Path) -> bool:
    """Tell whether a run ended because its numbers were not finite: it has no last loss."""
    status = read_json(run_dir / "status.json") or {}
    return bool(status.get("exit_code") == NonFiniteError.exit_code)


def record_of_start(run_dir: Path, attempt: int) -> dict[str, Any]:
    """Return what a start of a run recorded of itself (environment, data, versions); {} if nothing is left of it."""
    records = [
        read_json(run_dir / "run.json") or {},
        *(info.manifest for info in list_checkpoints(run_dir)[0]),
    ]
    return next((record for record in records if record.get("attempt") == attempt), {})


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of the run; None if it is missing, or damaged, which is warned of once."""
    file = JsonFile(path, ConfigError)
    try:
        found = file.read()
        required, optional = _FORMS.get(path.name, ({}, {}))
        file.check(found, required, optional)
    except ConfigError as error:
        if path.exists():
            warn_once(f"{error}; left out")
        return None
    return found
