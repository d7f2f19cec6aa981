"""The state of a run: all that a resume needs besides tensors and settings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from gpt2lab.files import COUNT, NUMBER, OBJECT, STRING, JsonFile, is_number, list_of, or_null

NOT_FINITE = "not finite"


@dataclass(frozen=True)
class TrainState:
    """Counts of what is done; a new one is made at each step."""

    step: int = 0  # completed optimizer steps
    samples: int = 0  # windows trained on: the next batch starts at this sample number
    tokens: int = 0  # trained on, also those that are no target
    train_seconds: float = 0.0  # steps only, no evaluation or saving, over all starts
    val_loss: float | None = None  # of exactly this step, None if it was not measured here
    best_val_loss: float | None = None
    best_step: int | None = None
    non_finite_in_a_row: int = 0  # updates skipped since the last good one
    recent_losses: tuple[float, ...] = ()  # what a spike is judged by
    # Updates skipped and samples jumped over: step, reason, samples.
    skipped: tuple[dict[str, Any], ...] = ()
    history: tuple[dict[str, Any], ...] = ()  # what --allow_change changed, and when
    unverified: tuple[str, ...] = ()  # shards read whose hashes were not compared before this save
    due: tuple[str, ...] = ()  # eval, hellaswag, sample: what this save did not wait for

    def advance(
        self,
        *,
        samples: int,
        tokens: int,
        seconds: float,
        loss: float,
        skip_reason: str | None = None,
    ) -> TrainState:
        """Return the state one optimizer step on; `skip_reason` says why its update was not made, if it was not."""
        state = dataclasses.replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            train_seconds=self.train_seconds + seconds,
            val_loss=None,
            due=(),
            non_finite_in_a_row=0 if skip_reason != NOT_FINITE else self.non_finite_in_a_row + 1,
            recent_losses=extend(self.recent_losses, loss),
        )
        if skip_reason is None:
            return state
        window = [self.samples, state.samples]
        record = {"step": state.step, "reason": skip_reason, "samples": window}
        return dataclasses.replace(state, skipped=(*self.skipped, record))

    def with_val_loss(self, val_loss: float) -> TrainState:
        """Return the state with this step's validation loss, which may be the best so far.

        Untrained weights (step 0) are never the best: there is no checkpoint of them.
        """
        state = dataclasses.replace(self, val_loss=val_loss)
        if self.step > 0 and (self.best_val_loss is None or val_loss < self.best_val_loss):
            state = dataclasses.replace(state, best_val_loss=val_loss, best_step=self.step)
        return state

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_file(file: JsonFile, values: dict[str, Any]) -> TrainState:
        """Build the state from `to_dict`'s values in a file; one that an earlier version did not write has its default.

        Raises: the file's error if a value is none of a state, or of one that this version does not know.
        """
        file.check(values, _REQUIRED, _RULES, where="state: ")
        if unknown := sorted(set(values) - {*_REQUIRED, *_RULES}):
            raise file.rejected(f"state: unknown {unknown[0]!r:.60}; written by another version?")
        for skip in values.get("skipped", ()):
            file.check(
                skip, {"step": COUNT, "reason": STRING, "samples": _RANGE}, where="skipped: "
            )
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return TrainState(**fields)


_OBJECTS = list_of(OBJECT, "a list of objects")
_RANGE = list_of(COUNT, "the numbers of two samples")
_LOSS = (lambda value: is_number(value) and abs(value) < 3.5e38, "a number that fp32 can hold")
_REQUIRED = dict.fromkeys(("step", "samples", "tokens"), COUNT)
_RULES = {
    "train_seconds": NUMBER,
    **dict.fromkeys(("val_loss", "best_val_loss"), or_null(_LOSS)),
    "best_step": or_null(COUNT),
    "non_finite_in_a_row": COUNT,
    "recent_losses": list_of(_LOSS, "a list of numbers"),
    **dict.fromkeys(("skipped", "history"), _OBJECTS),
    **dict.fromkeys(("unverified", "due"), list_of(STRING, "a list of text")),
}
WINDOW = 128  # losses that a new one is compared with, as in OLMo, levanter and llm.c


def extend(recent: tuple[float, ...], loss: float) -> tuple[float, ...]:
    """Return the window with one loss more. Spikes enter too: a lasting rise is no spike."""
    return (*recent, loss)[-WINDOW:] if math.isfinite(loss) else recent
