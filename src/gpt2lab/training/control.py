"""The one moment of a step at which all processes agree what happens next.

Each process brings what it knows: its signals, and whether it met an error. The first one adds the clock and the files
STOP and SAVE in the run's folder. The largest of each is everyone's answer, so no process acts on its own.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import GPT2LabError
from gpt2lab.training.deadline import REASONS, Deadline, find_due
from gpt2lab.training.heartbeat import Heartbeat
from gpt2lab.training.stop import Signals

STOP_FILE, SAVE_FILE = "STOP", "SAVE"
_STOP_FILE_CODE = 1000  # above every signal's number
_LOOK_EVERY = 0.5  # seconds between looks at the folder: it may lie on a slow network disk


@dataclass(frozen=True)
class Request:
    """What all processes agreed on."""

    stop: str | None = None  # a signal's name, "STOP file", or a deadline's reason, or `has_ended`
    save: bool = False
    refusal: GPT2LabError | None = None


class Control:
    """Asked once a step, and between the batches of an evaluation."""

    def __init__(
        self,
        signals: Signals,
        runtime: Runtime,
        *,
        run_dir: Path | None,
        deadlines: tuple[Deadline, ...],
        save_every_seconds: float,
        heartbeat: Heartbeat,
    ) -> None:
        """`run_dir` and `deadlines` count on the first process; `save_every_seconds` 0 means no such saves."""
        self.signals = signals
        self.margin_seconds = (
            0.0  # what a step and a save may still take: a deadline is met before it
        )
        self.has_ended: str | None = None  # a reason that every process found alike
        self._runtime, self._run_dir, self._deadlines = runtime, run_dir, deadlines
        self._save_every, self._heartbeat = save_every_seconds, heartbeat
        self._last_save = self._last_look = time.monotonic()
        self._save_is_due = self._stop_file = False

    def note_save(self) -> None:
        """Begin to count the minutes to the next save."""
        self._last_save, self._save_is_due = time.monotonic(), False

    def agree(self, refusal: GPT2LabError | None = None) -> Request:
        """Return what all agreed on; `refusal` is an error that this process met and that must end the run."""
        self._heartbeat.beat()
        slots = [self._stop(), self._save(), self._time(), int(refusal is not None)]
        stop, save, due, failed = self._runtime.largest(slots)
        self._save_is_due |= bool(save)
        reason = self.has_ended
        if failed:
            refusals = self._runtime.gather(refusal)
            refusal = next(one for one in refusals if one is not None)
            refusal.is_local = False  # from here on everyone's
        if stop:
            reason = "STOP file" if stop == _STOP_FILE_CODE else signal.Signals(stop).name
        elif due:
            reason = REASONS[due - 1]
        return Request(stop=reason, save=self._save_is_due, refusal=refusal)

    def is_interrupted(self) -> bool:
        """Tell all processes whether to leave an evaluation; they ask at equal places."""
        return self.agree().stop not in (None, self.has_ended)

    def is_asked_to_stop(self) -> bool:
        """Tell whether this process was asked by a signal; for what one process does alone."""
        return self.signals.level > 0

    def _stop(self) -> int:
        self._look_into_folder()
        return self.signals.number or (_STOP_FILE_CODE if self._stop_file else 0)

    def _save(self) -> int:
        if self.signals.wants_save:
            self.signals.wants_save, self._save_is_due = False, True
        if self._run_dir is not None and self._save_every:
            self._save_is_due |= time.monotonic() - self._last_save >= self._save_every
        return int(self._save_is_due)

    def _time(self) -> int:
        if self._run_dir is None:
            return 0
        reason = find_due(self._deadlines, margin_seconds=self.margin_seconds)
        return 0 if reason is None else 1 + REASONS.index(reason)

    def _look_into_folder(self) -> None:
        """Take up STOP and SAVE; each is removed when it is, so that the next start is not stopped too."""
        now = time.monotonic()
        if self._run_dir is None or now - self._last_look < _LOOK_EVERY:
            return
        self._last_look = now
        self._stop_file |= _take(self._run_dir / STOP_FILE)
        self._save_is_due |= _take(self._run_dir / SAVE_FILE)


def _take(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
