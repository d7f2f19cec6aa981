"""The one moment of a step at which all ranks agree what happens next.

Each rank brings its signals and whether it met an error; rank 0 adds the clock and the files STOP and SAVE in the run's
folder. One max-reduction gives every rank the same answer, so none acts on its own.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import GPT2LabError
from gpt2lab.training.heartbeat import Heartbeat
from gpt2lab.training.stop import REASONS, Signals, find_due

STOP_FILE, SAVE_FILE = "STOP", "SAVE"
_STOP_FILE_CODE = 1000  # above every signal's number
_LOOK_EVERY = 0.5  # seconds between looks at the folder: it may lie on a slow network disk


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on."""

    stop: str | None = None  # a signal's name, "STOP file", or a deadline's reason, or `own_reason`
    save: bool = False
    error: GPT2LabError | None = None

    @property
    def is_quiet(self) -> bool:
        """Tell whether training continues and nothing is asked for."""
        return self == Agreement()


class Control:
    """Asked once a step, and between the batches of an evaluation."""

    def __init__(
        self,
        signals: Signals,
        runtime: Runtime,
        *,
        run_dir: Path | None,
        deadlines: dict[str, float],
        save_every_seconds: float,
        heartbeat: Heartbeat,
    ) -> None:
        """`run_dir` and `deadlines` count on rank 0; `save_every_seconds` 0 means no such saves."""
        self.signals = signals
        self.margin_seconds = 0.0  # of a step and a save: a deadline is met this long before it
        self.own_reason: str | None = None  # a reason that every rank found alike
        self._runtime, self._run_dir, self._deadlines = runtime, run_dir, deadlines
        self._save_every, self._heartbeat = save_every_seconds, heartbeat
        self._last_save = self._last_look = time.monotonic()
        self._save_is_due = self._stop_file = False

    def note_save(self) -> None:
        """Begin to count the minutes to the next save."""
        self._last_save, self._save_is_due = time.monotonic(), False

    def agree(self, error: GPT2LabError | None = None) -> Agreement:
        """Return what all ranks agreed on; `error` is one that this rank met and that must end the run."""
        self._heartbeat.beat()
        due = self._look()
        stop = self.signals.number or (_STOP_FILE_CODE if self._stop_file else 0)
        slots = [stop, int(self._save_is_due), due, int(error is not None)]
        stop, save, due, failed = self._runtime.max_over_ranks(slots)
        self._save_is_due |= bool(save)
        reason = self.own_reason
        if failed:
            error = next(one for one in self._runtime.gather(error) if one is not None)
            error.is_local = False  # all ranks raise it
        if stop:
            reason = "STOP file" if stop == _STOP_FILE_CODE else signal.Signals(stop).name
        elif due:
            reason = REASONS[due - 1]
        return Agreement(stop=reason, save=self._save_is_due, error=error)

    def is_interrupted(self) -> bool:
        """Tell all ranks whether to leave an evaluation; they ask at equal places."""
        return self.agree().stop not in (None, self.own_reason)

    def _look(self) -> int:
        """Collect requests to save or stop; return the index of a due deadline in REASONS, counted from 1, or 0.

        The files STOP and SAVE are removed, so that the next start is not stopped too.
        """
        if self.signals.wants_save:
            self.signals.wants_save, self._save_is_due = False, True
        if self._run_dir is None:
            return 0
        now = time.monotonic()
        if now - self._last_look >= _LOOK_EVERY:
            self._last_look = now
            self._stop_file |= _take(self._run_dir / STOP_FILE)
            self._save_is_due |= _take(self._run_dir / SAVE_FILE)
        if self._save_every:
            self._save_is_due |= now - self._last_save >= self._save_every
        reason = find_due(self._deadlines, margin_seconds=self.margin_seconds)
        return 0 if reason is None else 1 + REASONS.index(reason)


def _take(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
