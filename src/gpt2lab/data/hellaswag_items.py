"""HellaSwag items: reading, checking, and the two ways in which the field writes them as text. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2lab.errors import DataError

Style = Literal["harness", "tutorial"]


@dataclass(frozen=True)
class Item:
    """One question: a context, four endings, and which of them is true."""

    context: str
    ctx_parts: tuple[str, str] | None  # the context's two halves, where the file has them
    activity: str
    endings: tuple[str, str, str, str]
    label: int


@dataclass(frozen=True)
class Question:
    """One item as token ids, in one style."""

    context: list[int]
    endings: list[list[int]]
    ending_bytes: list[int]


def load_items(path: Path, *, limit: int = 0) -> list[Item]:
    """Read items from a file with one JSON object a line; `limit` > 0 takes a fixed random subset.

    Raises: DataError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as HellaSwag items ({error})") from error
    items = [_parse(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise DataError(f"{path}: no HellaSwag items")
    if 0 < limit < len(items):
        chosen = np.random.RandomState(0).permutation(len(items))[:limit]
        items = [items[i] for i in sorted(chosen)]
    return items


def _parse(line: str, where: str) -> Item:
    try:
        row: dict[str, Any] = json.loads(line)
        endings, label = tuple(row["endings"]), int(row["label"])
        parts = (row["ctx_a"], row["ctx_b"]) if "ctx_a" in row and "ctx_b" in row else None
        item = Item(row["ctx"], parts, row.get("activity_label", ""), endings, label)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{where}: not a HellaSwag item ({type(error).__name__}: {error})"
        ) from error
    if len(endings) != 4 or not 0 <= label < 4 or not all(isinstance(e, str) for e in endings):
        raise DataError(f"{where}: a HellaSwag item has four endings and a label from 0 to 3")
    return item


def tokenize(item: Item, style: Style) -> Question:
    """Write one item as token ids.

    `harness`: activity label, capitalised second half, brackets cleaned, context and ending encoded as one text.
    Source: EleutherAI lm-evaluation-harness 0.4, lm_eval/tasks/hellaswag/utils.py. `tutorial`: the plain context,
    each ending encoded by itself after a space. Source: karpathy/build-nanogpt, hellaswag.py.
    """
    from gpt2lab.data.tokenizer import gpt2_encoding

    encode = gpt2_encoding().encode_ordinary
    if style == "tutorial":
        endings = [encode(" " + ending) for ending in item.endings]
        return Question(encode(item.context), endings, [len(e.encode()) for e in item.endings])
    context = item.context
    if item.ctx_parts is not None:
        context = f"{item.ctx_parts[0]} {item.ctx_parts[1].capitalize()}"
    prompt = _clean(f"{item.activity}: {context}" if item.activity else context).rstrip()
    texts = [_clean(ending) for ending in item.endings]
    ids = encode(prompt)
    whole = [encode(f"{prompt} {text}") for text in texts]
    return Question(ids, [w[len(ids) :] for w in whole], [len(text.encode()) for text in texts])


def _clean(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
