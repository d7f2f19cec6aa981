"""Conversations from a file, a Hugging Face dataset, or the small demo set of the package. No torch.

The keys of a record tell its format:
    {"messages": [{"role": "user", "content": "..."}, ...]}              OpenAI, UltraChat 200k
    {"conversations": [{"from": "human", "value": "..."}, ...]}          ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}   Alpaca; input may be missing
    {"data": ["question", "answer", ...]}                                UltraChat
    {"prompt": "...", "completion": "..."}                               OpenAI's older shape
Each may also have a "system" text.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab.data.hub import is_offline
from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import open_regular, read_regular
from gpt2lab.tokenizers.chat_template import Turn, alternating

DEMO = "demo"
HUB = "hf:"
_DEMO_FILE = Path(__file__).with_name("demo.jsonl")
_FORMS = (
    '"messages", "conversations", "instruction" and "output", "data", or "prompt" and "completion"'
)
_TAKES = "--instructions takes a .jsonl, .json or .parquet file, hf:NAME or demo"
_ROLES = {  # other words for a role, by the key that holds it
    "role": {"developer": "system"},
    "from": {"human": "user", "gpt": "assistant"},
}
_TOOLS = "it calls tools, which the chat template does not support"
_OF_TOOLS = {"tool", "function", "function_call", "observation", "tool_call", "tool_response"}


@dataclass(frozen=True)
class Conversation:
    """Turns of user and assistant in alternation, the last one by the assistant; a system turn may come first."""

    turns: tuple[Turn, ...]
    where: str  # file and line, for messages


def read_conversations(source: str) -> list[Conversation]:
    """Return the conversations of `source` in order: `demo`, hf:NAME, or the path of a .jsonl, .json or .parquet file.

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
    """Yield (where, record); the records of a .jsonl file are lines of JSON in bytes."""
    if source.startswith(HUB):
        yield from _hub_records(source)
        return
    path = _DEMO_FILE if source == DEMO else Path(source)
    read = {".json": _json_records, ".parquet": _parquet_records}.get(path.suffix, _line_records)
    with system_errors_as(DataError, path, fix=_TAKES):
        yield from read(path)


def _line_records(path: Path) -> Iterator[tuple[str, bytes]]:
    with open_regular(path, follow=True) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of an array. A file of lines may have this name too."""
    content = read_regular(path, at_most=1 << 34, follow=True)
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from _line_records(path)
        return
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    for number, record in enumerate(records, start=1):
        yield f"{path} record {number}", record


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1000)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path} row {number}", row
    except pa.ArrowException as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from error


def _hub_records(source: str) -> Iterator[tuple[str, Any]]:
    offline = is_offline()
    from datasets import load_dataset

    name = source.removeprefix(HUB)
    try:
        for number, row in enumerate(load_dataset(name, split="train")):
            yield f"{source} row {number}", row
    except Exception as error:  # such as no network, no such dataset, no access
        message = f"{source}: cannot be read ({type(error).__name__}: {error})"
        if offline:
            message = f"{source}: the Hugging Face Hub cannot be reached, and the dataset was not downloaded before"
        raise DataError(" ".join(message.split())) from error


def _turns(record: Any) -> tuple[Turn, ...]:
    """Return the turns of a record."""
    if isinstance(record, bytes):
        try:
            record = json.loads(record.decode("utf-8-sig"))  # Windows writes a byte-order mark
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{type(record).__name__}, not an object with {_FORMS}")
    # Every row of a dataset has all columns; null stands for a missing value.
    has = {key for key, value in record.items() if value is not None}
    if has >= {"chosen", "rejected"}:
        raise ValueError("preference data; training on preferences is not implemented")
    if record.get("tools") or record.get("functions"):
        raise ValueError(_TOOLS)
    if "messages" in has:
        turns = _of_messages(record["messages"], "messages")
    elif "conversations" in has:
        turns = _of_messages(record["conversations"], "conversations")
    elif "instruction" in has and "output" in record:
        turns = _of_alpaca(record)
    elif "data" in has:
        turns = _of_texts(record["data"])
    elif "prompt" in has and "completion" in record:
        turns = [Turn("user", _text(record, "prompt"))]
        turns += [Turn("assistant", _text(record, "completion"))]
    else:
        keys = ", ".join(map(str, record)) or "nothing"
        raise ValueError(f"it has the keys {keys}; needed are {_FORMS}")
    if record.get("system"):
        turns = [Turn("system", _text(record, "system")), *turns]
    return alternating(turns, last="assistant")


def _of_messages(messages: Any, key: str) -> list[Turn]:
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError(f'"{key}" is not a list of {{"role", "content"}} or {{"from", "value"}}')
    turns = []
    for one in messages:
        who, what = ("role", "content") if one.get("role") is not None else ("from", "value")
        role = str(one.get(who))
        if role in _OF_TOOLS or one.get("tool_calls") or one.get("function_call"):
            raise ValueError(_TOOLS)
        if one.get("weight") not in (None, 1):
            raise ValueError('a "weight" other than 1; weighing single answers is not implemented')
        turns.append(Turn(_ROLES[who].get(role, role), _text(one, what)))
    return turns


def _of_alpaca(record: dict[str, Any]) -> list[Turn]:
    if record.get("history"):
        raise ValueError('"history" is not supported; write the conversation as "messages"')
    asked = _text(record, "instruction")
    if record.get("input"):
        asked = f"{asked}\n\n{_text(record, 'input')}".strip()
    return [Turn("user", asked), Turn("assistant", _text(record, "output"))]


def _of_texts(texts: Any) -> list[Turn]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError('"data" is not a list of texts')
    return [Turn("assistant" if n % 2 else "user", text.strip()) for n, text in enumerate(texts)]


def _text(record: dict[str, Any], key: str) -> str:
    """Return the text of a field without white space around it."""
    return _whole_text(record, key).strip()


def _whole_text(record: dict[str, Any], key: str) -> str:
    """Return the text of a field: a string, or OpenAI's list of text parts."""
    value = record.get(key)
    if isinstance(value, list) and value:
        kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
        if other := [kind for kind in kinds if kind != "text"]:
            raise ValueError(f'"{key}" has a part of type {other[0]!r}; only text is supported')
        value = "".join(_whole_text(part, "text") for part in value)
    if not isinstance(value, str):
        raise ValueError(f'"{key}" is {type(record.get(key)).__name__}, not text')
    return value
