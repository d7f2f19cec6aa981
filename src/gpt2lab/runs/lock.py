"""The lock of a run's folder: one process trains in it at a time. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import time
from pathlib import Path
from typing import IO

LOCK = "run.lock"


def lock(file: IO[str]) -> None:
    """Lock a file; retry twice, because readers such as status.py hold the lock for a moment.

    Raises: OSError if it stays locked.
    """
    for pause in (0.05, 0.2):
        with contextlib.suppress(OSError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder_of(run_dir: Path) -> str | None:
    """Return who trains in a folder, as `process 17 on host`, None if nobody does."""
    try:
        with open(run_dir / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
    except OSError:
        pass
    return None
