"""Conversations from a .jsonl file, a Hugging Face dataset, or the small demo set of the package. No torch.

Records have one of two forms, which may be mixed:
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"instruction": "...", "input": "... (may be missing)", "output": "..."}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab.checkpoint.hub import is_offline
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.chat_template import Turn

DEMO = "demo"
HUB = "hf:"
_DEMO_FILE = Path(__file__).with_name("demo.jsonl")
_FORMS = '"messages" (a list of {"role", "content"}), or "instruction" and "output" (and "input")'


@dataclass(frozen=True)
class Conversation:
    """Turns of user and assistant in alternation, the last one by the assistant; a system turn may come first."""

    turns: tuple[Turn, ...]
    where: str  # file and line, for messages


def read_conversations(source: str) -> list[Conversation]:
    """Return the conversations of `source` in order: `demo`, hf:NAME, or the path of a .jsonl file.

    Raises: DataError naming the first bad record and counting the others.
    """
    found: list[Conversation] = []
    problems: list[str] = []
    for where, record in _records(source):
        try:
            found.append(Conversation(_turns(record), where))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if problems:
        more = f" (and {len(problems) - 1:,} more like it)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}; correct the record or remove it")
    if not found:
        raise DataError(f"{source}: holds no conversations; a line holds {_FORMS}")
    return found


def _records(source: str) -> Iterator[tuple[str, Any]]:
    """Yield (where, record); the records of a file are lines of JSON in bytes."""
    if source.startswith(HUB):
        yield from _hub_records(source)
        return
    path = _DEMO_FILE if source == DEMO else Path(source)
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; --instructions takes a .jsonl file, hf:NAME or demo"
        ) from error


def _hub_records(source: str) -> Iterator[tuple[str, Any]]:
    offline = is_offline()
    from datasets import load_dataset

    name = source.removeprefix(HUB)
    try:
        for number, row in enumerate(load_dataset(name, split="train")):
            yield f"{source} row {number}", row
    except Exception as error:  # of many kinds: no network, no such dataset, no access
        message = f"{source}: cannot be read ({type(error).__name__}: {error})"
        if offline:
            message = f"{source}: the Hugging Face Hub cannot be reached, and the dataset was not downloaded before"
        raise DataError(" ".join(message.split())) from error


def _turns(record: Any) -> tuple[Turn, ...]:
    """Return the turns of a record.

    Raises: ValueError saying what is wrong with it.
    """
    if isinstance(record, bytes):
        try:
            record = json.loads(record.decode("utf-8-sig"))  # Windows writes a byte-order mark
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{type(record).__name__}, not an object with {_FORMS}")
    if record.get("messages") is not None:
        return _turns_of_messages(record["messages"])
    if record.get("instruction") is None or "output" not in record:
        keys = ", ".join(map(str, record)) or "nothing"
        raise ValueError(f"it has {keys}; needed is {_FORMS}")
    asked = _text(record, "instruction")
    if record.get("input"):
        asked += f"\n\n{_text(record, 'input')}"
    return (Turn("user", asked), Turn("assistant", _text(record, "output")))


def _turns_of_messages(messages: Any) -> tuple[Turn, ...]:
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError('"messages" is not a list of {"role", "content"}')
    turns = tuple(Turn(str(one.get("role")), _text(one, "content")) for one in messages)
    after_system = turns[1:] if turns and turns[0].role == "system" else turns
    for place, turn in enumerate(after_system):
        expected = "user" if place % 2 == 0 else "assistant"
        if turn.role != expected:
            raise ValueError(f"a message of role {turn.role!r} where {expected!r} is due")
    if not after_system or len(after_system) % 2:
        raise ValueError("the last message must be the assistant's")
    return turns


def _text(record: dict[str, Any], key: str) -> str:
    if not isinstance(record.get(key), str):
        raise ValueError(f'"{key}" is {type(record.get(key)).__name__}, not text')
    return str(record[key]).strip()
