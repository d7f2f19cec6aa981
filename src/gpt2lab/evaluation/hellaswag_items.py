"""HellaSwag items: reading, checking, and the two ways in which the field writes them as text. No torch.

Zellers et al. 2019, arXiv:1905.07830.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding

Style = Literal["harness", "tutorial"]
STYLES: tuple[Style, ...] = ("harness", "tutorial")


@dataclass(frozen=True)
class Item:
    """One question: a context, four endings, and which of them is true."""

    context: str
    ctx_parts: tuple[str, str] | None  # the context's two halves, where the file has them
    activity: str
    endings: tuple[str, ...]  # four
    label: int


@dataclass(frozen=True)
class Question:
    """One item as token ids, in one style."""

    context: list[int]
    endings: list[list[int]]
    ending_chars: list[int]  # length of each ending's text, without the space before it


def read_items(path: Path) -> list[Item]:
    """Read items from a file with one JSON object a line.

    Raises: DataError naming file and line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read as HellaSwag items ({error.strerror}); "
            f"give another --hellaswag_path (None: no HellaSwag)"
        ) from error
    items = [_parse(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise DataError(f"{path}: no HellaSwag items")
    return items


def _parse(line: bytes, where: str) -> Item:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); a truncated file?") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object, so not a HellaSwag item")
    texts = {name: _text(row, name, where) for name in ("ctx", "activity_label")}
    parts = None
    if "ctx_a" in row and "ctx_b" in row:
        parts = (_text(row, "ctx_a", where), _text(row, "ctx_b", where))
    endings = row.get("endings")
    if not isinstance(endings, list) or len(endings) != 4:
        raise DataError(f"{where}: a HellaSwag item has a list of four `endings`")
    for number, ending in enumerate(endings):
        if not isinstance(ending, str) or not ending.strip():
            raise DataError(f"{where}: ending {number} is empty or no text")
    label = str(row.get("label", ""))  # a number in the original file, text on Hugging Face
    if label not in ("0", "1", "2", "3"):
        raise DataError(f"{where}: label {label!r} must be 0, 1, 2 or 3 (test splits have none)")
    return Item(texts["ctx"], parts, texts["activity_label"], tuple(endings), int(label))


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: a HellaSwag item has a text `{name}`")
    return value


def tokenize(item: Item, style: Style) -> Question:
    """Write one item as token ids.

    `harness`: activity label, capitalised second half, brackets cleaned, context and ending encoded as one text.
    Source: EleutherAI lm-evaluation-harness 0.4, lm_eval/tasks/hellaswag/utils.py and api/model.py (_encode_pair).
    `tutorial`: the plain context, each ending encoded by itself after a space. Source: karpathy/build-nanogpt,
    hellaswag.py. A context without a token becomes <|endoftext|>, as in the harness.
    """
    encode = gpt2_encoding().encode_ordinary
    if style == "tutorial":
        texts = list(item.endings)
        context = encode(item.context)
        endings = [encode(f" {text}") for text in texts]
    else:
        whole_context = item.context
        if item.ctx_parts is not None:
            whole_context = f"{item.ctx_parts[0]} {item.ctx_parts[1].capitalize()}"
        query = _clean(f"{item.activity}: {whole_context}")
        texts = [_clean(text) for text in item.endings]
        context = encode(query.rstrip())  # spaces at its end belong to the ending's first token
        endings = [encode(f"{query} {text}")[len(context) :] for text in texts]
    return Question(context or [END_OF_TEXT], endings, [len(text) for text in texts])


def _clean(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
