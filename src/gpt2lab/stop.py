"""Signals become a wish to stop, which the loop asks for between steps."""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GIVE_UP_AFTER = 3  # the third signal ends the process where it stands


class StopFlag:
    """Set by SIGINT or SIGTERM; the handler only notes it, because a signal may land anywhere."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._count = 0
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._count += 1
        if self._count >= _GIVE_UP_AFTER:
            self.close()
            signal.raise_signal(number)

    def request(self, reason: str) -> None:
        """Ask for a stop without a signal; a signal that came before goes first."""
        self.signal_name = self.signal_name or reason

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
