"""What a line of metrics.jsonl must be, so that every reader can use it. No torch."""

from __future__ import annotations

import json
from typing import Any

from gpt2lab.files import (
    COUNT,
    NUMBER,
    SIZE,
    STRING,
    Rule,
    Rules,
    is_number,
    mismatch,
    object_of,
    or_null,
)

Event = dict[str, Any]
# A step's fields that readers want of all steps; what is missing becomes NaN.
FLOATS = (
    *("time", "loss", "lr", "muon_lr", "grad_norm", "tokens", "tokens_per_second", "mfu"),
    *("step_seconds", "elapsed_seconds", "cpu_seconds", "peak_memory_bytes"),
)
INTEGERS = ("step", "attempt")
LIMIT = 2**32  # of step and attempt
_LAST_DATE = 95_617_584_000  # Unix seconds of the year 5000; a much later moment has no local time

_NUMBER = or_null(NUMBER)
_NUMBERS = object_of(NUMBER, "an object of numbers")
_LOSSES = or_null(object_of(_NUMBER, "an object of numbers"))  # of a mixture's sources
_PAIRS = object_of(
    (lambda value: isinstance(value, list) and len(value) == 2, ""), "an object of pairs"
)
_INTEGER: Rule = (lambda value: type(value) is int and 0 <= value < LIMIT, "a whole number")
_MOMENT: Rule = (lambda value: is_number(value) and 0 <= value < _LAST_DATE, "Unix seconds")

_ALL: Rules = {"event": STRING, "time": _MOMENT, **dict.fromkeys(INTEGERS, _INTEGER)}
_SOME: Rules = dict.fromkeys(("seconds", "stall_seconds"), _NUMBER)
_SCORES = [name + end for name in ("acc", "acc_norm", "acc_token_norm") for end in ("", "_se")]
# kind -> (what readers rely on, what they use where it is there); another kind's fields are free.
_FORMS: dict[str, tuple[Rules, Rules]] = {
    "begin": ({"max_steps": COUNT, "world_size": SIZE}, {"tokens_per_step": COUNT}),
    "resume": ({}, {"changes": _PAIRS, "level": STRING}),
    "rewind": ({"spike_step": COUNT}, {}),
    "step": (
        {},
        {
            **dict.fromkeys((*FLOATS, "remaining_seconds"), _NUMBER),
            **dict.fromkeys(("tokens", "peak_memory_bytes"), or_null(COUNT)),
            "batch_hash": or_null(STRING),
            "epochs_by_source": _NUMBERS,
        },
    ),
    "mixture": ({"weights": _NUMBERS}, {}),
    "eval": (
        {"val_loss": _NUMBER},
        {
            "val_loss_se": _NUMBER,
            "val_tokens": COUNT,
            **dict.fromkeys(("val_loss_by_source", "val_loss_se_by_source"), _LOSSES),
        },
    ),
    "hellaswag": ({"n": SIZE}, dict.fromkeys(_SCORES, _NUMBER)),
    "sample": ({"text": STRING}, {}),
    "checkpoint": ({}, {"path": STRING, "bytes": COUNT}),
    "warning": ({"message": STRING}, {}),
    "stop": ({"reason": STRING}, {}),
    "done": ({"reason": STRING}, {}),
}


def parse_line(line: bytes) -> Event:
    """Return the event of a line.

    Zero bytes before it are lines that a power cut took: they were not flushed, no checkpoint rests on them.

    Raises: ValueError if it is none.
    """
    try:
        event = json.loads(line.rpartition(b"\0")[2])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if (problem := problem_of(event)) is not None:
        raise ValueError(problem)
    found: Event = event
    return found


def problem_of(value: Any) -> str | None:
    """Return why a value is not an event that readers can use, None if it is."""
    problem = mismatch(value, _ALL) if isinstance(value, dict) else "no object"
    if problem is None:
        required, optional = _FORMS.get(value["event"], ({}, {}))
        problem = mismatch(value, required, {**_SOME, **optional})
        if problem is None:
            return None
        problem = f"{value['event']}: {problem}"
    return f"not an event of gpt2lab ({problem})"
