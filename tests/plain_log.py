"""A run's log read without a Log: line by line, each event as a dictionary."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from gpt2lab.runs.events import METRICS, Event, parse_line
from gpt2lab.runs.history import Log


def read_events(run_dir: Path) -> list[Event]:
    """Return all events, without damaged lines."""
    path, events = run_dir / METRICS, list[Event]()
    if path.exists():
        with open(path, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    events.append(parse_line(line))
    return events


def current_events(events: list[Event], kind: str) -> dict[int, Event]:
    """Return {step: event} of one kind along the steps that led to the newest weights."""
    by_step: dict[int, Event] = {}
    for event in events:
        if event["event"] in ("begin", "resume", "rewind"):
            by_step = {step: kept for step, kept in by_step.items() if step <= event["step"]}
        elif event["event"] == kind:
            by_step[event["step"]] = event
    return by_step


def log_of(events: Iterable[Event]) -> Log:
    """Return the log of these events."""
    return Log("".join(json.dumps(event) + "\n" for event in events).encode())
