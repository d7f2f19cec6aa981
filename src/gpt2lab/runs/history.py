"""Read what a run recorded: metrics.jsonl and the settings of the last start. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.checkpoint.catalog import METRICS, find_folder
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import read_settings
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.files import COUNT, NUMBER, OBJECT, STRING, TEXT, JsonFile, Rules, or_null
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record

_KEYS = {"event", "time", "attempt", "step"}
_FORMS: dict[
    str, tuple[Rules, ...]
] = {  # what is read of a file: keys that it has, and that it may have
    "status.json": (
        {"state": TEXT, "step": COUNT},
        {"exit_code": or_null(NUMBER), "reason": or_null(STRING)},
    ),
    "run.json": ({}, {"environment": OBJECT}),
}


def find_run(run: str, *, checkpoint_dir: Path | None = None) -> Path:
    """Return the folder of a run given by its name in the typed `checkpoint_dir`, default checkpoints/, or by a path.

    Raises: ConfigError if there is no such folder.
    """
    runs = paths.runs_folder(checkpoint_dir)
    folder = find_folder(run, runs)
    if folder is None:
        raise ConfigError(
            f"{run}: no run of this name in {paths.for_people(runs)}, and no such folder"
        )
    return folder


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the run's events in order; an unterminated last line (a killed writer) is left out.

    Raises: GPT2LabError if a line is not JSON.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # last: nothing or a torn line
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise GPT2LabError(
                f"{path} line {number}: not JSON ({error}); edited, or the disk is damaged"
            ) from error
        if not isinstance(event, dict) or not set(event) >= _KEYS:
            raise GPT2LabError(f"{path} line {number}: not an event of gpt2lab")
        events.append(event)
    return events


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


def last_attempt(events: list[dict[str, Any]]) -> int:
    """Return how many starts the run has had."""
    return max((event["attempt"] for event in events), default=0)


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


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of the run, None if it is missing or damaged."""
    file = JsonFile(path, ConfigError)
    try:
        found = file.read()
        required, optional = _FORMS.get(path.name, ({}, {}))
        file.check(found, required, optional)
    except ConfigError:
        return None
    return found


def spent_seconds(events: list[dict[str, Any]]) -> float:
    """Return the seconds of all starts, each from its beginning, without the pauses between them."""
    spent: dict[int, float] = {}
    for event in events:
        attempt = event["attempt"]
        if event["event"] == "step":  # includes everything before it in this start
            spent[attempt] = event.get("elapsed_seconds") or event["step_seconds"]
        elif event["event"] != "done":
            spent[attempt] = spent.get(attempt, 0.0) + (event.get("seconds") or 0.0)
    return sum(spent.values())
