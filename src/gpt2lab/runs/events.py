"""metrics.jsonl: the form of its lines, and how a line is read. No torch."""

import json
import zlib
from math import isfinite, nan
from typing import Annotated, Any

import msgspec

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

METRICS = "metrics.jsonl"
Event = dict[str, Any]
# Fields of a step that readers use as columns.
COLUMNS = (
    *("loss", "lr", "muon_lr", "grad_norm", "tokens", "tokens_per_second"),
    *("step_seconds", "elapsed_seconds", "cpu_seconds", "peak_memory_bytes"),
)
_COUNTS = ("tokens", "peak_memory_bytes")
CRC = b', "crc": "'  # before the checksum of a line
LIMIT = 2**32  # of step and attempt
_LAST_DATE = 95_617_584_000  # Unix seconds of the year 5000; much later times cannot be formatted

_NUMBER = or_null(NUMBER)
_NUMBERS = object_of(NUMBER, "an object of numbers")
_LOSSES = or_null(object_of(_NUMBER, "an object of numbers"))  # of a mixture's sources
_PAIRS = object_of(
    (lambda value: isinstance(value, list) and len(value) == 2, ""), "an object of pairs"
)
_INTEGER: Rule = (lambda value: type(value) is int and 0 <= value < LIMIT, "a whole number")
_MOMENT: Rule = (lambda value: is_number(value) and 0 <= value < _LAST_DATE, "Unix seconds")

_ALL: Rules = {"event": STRING, "time": _MOMENT, "step": _INTEGER, "attempt": _INTEGER}
_SECONDS = ("seconds", "stall_seconds")
_SOME: Rules = dict.fromkeys(_SECONDS, _NUMBER)
_SCORES = [name + end for name in ("acc", "acc_norm", "acc_token_norm") for end in ("", "_se")]
# kind -> (required fields, optional fields); other kinds may have any fields.
_FORMS: dict[str, tuple[Rules, Rules]] = {
    "begin": ({"max_steps": COUNT, "world_size": SIZE}, {"tokens_per_step": COUNT}),
    "resume": ({}, {"changes": _PAIRS, "level": STRING}),
    "rewind": ({"spike_step": COUNT}, {}),
    "step": (
        {},
        {
            **dict.fromkeys((*COLUMNS, "mfu", "remaining_seconds"), _NUMBER),
            **dict.fromkeys(_COUNTS, or_null(COUNT)),
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
    "core": ({"n": SIZE}, dict.fromkeys(("centered", "centered_se"), _NUMBER)),
    "sample": ({"text": STRING}, {}),
    "checkpoint": ({}, {"path": STRING, "bytes": COUNT}),
    "warning": ({"message": STRING}, {}),
    "stop": ({"reason": STRING}, {}),
    "done": ({"reason": STRING}, {"val_loss_average": _NUMBER}),
}


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
# The rules of a step as types, by which msgspec checks a line 10 times as fast as `parse_line` does. A column that is
# missing is NaN; a line in which one is null is for `parse_line`.
Step = msgspec.defstruct(
    "Step",
    [
        ("time", Annotated[float, msgspec.Meta(ge=0, lt=_LAST_DATE)]),
        *((name, Annotated[int, msgspec.Meta(ge=0, lt=LIMIT)]) for name in ("attempt", "step")),
        *((name, _Count if name in _COUNTS else float, nan) for name in COLUMNS),
        *((name, float | None, None) for name in ("mfu", "remaining_seconds", *_SECONDS)),
        ("batch_hash", str | None, None),
        ("epochs_by_source", dict[str, float], {}),
    ],
    tag_field="event",
    tag="step",
    gc=False,
)
_decode = msgspec.json.Decoder(Step).decode


def read_line(line: bytes) -> msgspec.Struct | Event:
    """Return the fields of a step as a `Step`, and another event as `parse_line` does.

    Raises: ValueError as `parse_line` does.
    """
    try:
        step = _decode(line)
        if _is_as_written(line):
            return step
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    event = parse_line(line)
    if event["event"] != "step":
        return event
    return msgspec.convert({k: v for k, v in event.items() if v is not None}, Step)


def finite(value: Any) -> Any:
    """Return JSON values with null in the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def encode_line(event: Event) -> bytes:
    """Return the line of an event, whose last key is the crc32 of the bytes before that key.

    Raises: ValueError for a number that is not finite.
    """
    body = json.dumps(event, allow_nan=False).encode()[:-1]
    return body + CRC + b'%08x"}\n' % zlib.crc32(body)


def _is_as_written(line: bytes) -> bool:
    """Compare a line with its checksum; those of earlier versions have none. No text of an event can hold the key."""
    body, has_checksum, end = line.rpartition(CRC)
    return not has_checksum or end.rstrip(b"\n") == b'%08x"}' % zlib.crc32(body.lstrip(b"\0"))


def parse_line(line: bytes) -> Event:
    """Return the event of a line, without its checksum.

    Zero bytes before it are lines that were lost in a power cut: they were not flushed, and no checkpoint needs them.

    Raises: ValueError if it is not an event, or not what was written.
    """
    try:
        event: Event = json.loads(line.rpartition(b"\0")[2])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    problem, kind = mismatch(event, _ALL) if isinstance(event, dict) else "no object", ""
    if problem is None:
        kind = f"{event['event']}: "
        required, optional = _FORMS.get(event["event"], ({}, {}))
        problem = mismatch(event, required, {**_SOME, **optional})
    if problem is not None:
        raise ValueError(f"not an event of gpt2lab ({kind}{problem})")
    if not _is_as_written(line):
        raise ValueError("not what was written (its crc is another)")
    event.pop("crc", None)
    return event
