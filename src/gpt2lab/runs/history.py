"""Read what a run recorded: metrics.jsonl and the settings of the last start. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.checkpoint.catalog import METRICS, find_folder
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record

_KEYS = {"event", "time", "attempt", "step"}


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
    path = run_dir / "config.json"
    try:
        return override(Config(), json.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; is this the folder of a run?") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from error


def read_tokenizer(run_dir: Path) -> Tokenizer | None:
    """Return the tokenizer of a run; GPT-2's where run.json is older than other tokenizers, None for an unknown one.

    Raises: DataError if the tokenizer's files are missing or another's.
    """
    path = run_dir / "run.json"
    try:
        record = json.loads(path.read_bytes()).get("tokenizer", GPT2.record())
    except (OSError, ValueError, AttributeError):
        return GPT2
    return of_record(record, run_dir, path.name)


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


def recorded_after(events: list[dict[str, Any]], step: int) -> dict[str, dict[str, Any]]:
    """Return {kind: event} of exactly this step, along the steps that led to the newest weights."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] in ("begin", "resume", "rewind"):
            found = found if step <= event["step"] else {}
        elif event["step"] == step:
            found[event["event"]] = event
    return found


def has_completed(run_dir: Path, step: int) -> bool:
    """Tell whether a run came to its end at this step: its status is the last file that an end writes."""
    status = read_json(run_dir / "status.json") or {}
    return status.get("state") == "completed" and status.get("step") == step


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of the run, None if it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


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
