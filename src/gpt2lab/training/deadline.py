"""When a start must end by the clock: typed moments and the scheduler's limit. No torch.

A moment is turned into a reading of the monotonic clock once, at the start: clocks that jump later change nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpt2lab.errors import ConfigError

# The first process alone looks at the clock and tells the others a place in this list.
REASONS = ("max_hours", "stop_at", "SLURM_JOB_END_TIME")


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock, and who set it."""

    reason: str
    at: float


def find_deadlines(
    stop_at: str | None,
    environ: Mapping[str, str],
    *,
    max_hours: float | None = None,
    now: datetime | None = None,
) -> tuple[Deadline, ...]:
    """Return the deadlines of this start: --max_hours, --stop_at, and the end of the Slurm job where there is one.

    Raises: ConfigError if --stop_at is not a moment, or has passed.
    """
    now = now or datetime.now().astimezone()
    moments: dict[str, float] = {}
    if max_hours is not None:
        moments["max_hours"] = now.timestamp() + 3600 * max_hours
    if stop_at is not None:
        moments["stop_at"] = parse_moment(stop_at, now=now).timestamp()
    slurm = environ.get("SLURM_JOB_END_TIME", "")
    if slurm.isdigit() and int(slurm) > 0:
        moments["SLURM_JOB_END_TIME"] = float(slurm)
    return tuple(
        Deadline(reason, time.monotonic() + at - now.timestamp()) for reason, at in moments.items()
    )


def parse_moment(text: str, *, now: datetime) -> datetime:
    """Return the moment that `HH:MM` (the next one), or an ISO date and time, means.

    Raises: ConfigError.
    """
    wall = now.astimezone().replace(tzinfo=None)
    try:
        if clock := re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip()):
            moment = wall.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
            moment = moment if moment > wall else moment + timedelta(days=1)
        else:
            moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        moment = moment.astimezone()  # by the clock of that day: summer time may begin before it
    except (ValueError, OverflowError):
        raise ConfigError(
            f"stop_at {text!r} is no moment; write 18:30 or 2026-11-21T18:30 (local time, or with +02:00)"
        ) from None
    if moment <= now:
        raise ConfigError(f"stop_at {text} has passed; it is {now:%Y-%m-%dT%H:%M} now")
    return moment


def find_due(deadlines: tuple[Deadline, ...], *, margin_seconds: float) -> str | None:
    """Return the reason of a deadline that is less than the margin away, or None."""
    now = time.monotonic()
    return next((d.reason for d in deadlines if d.at - now < margin_seconds), None)
