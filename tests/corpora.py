"""A small corpus of text, and what it becomes when it is prepared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from gpt2lab.data.prepare.pipeline import Result, Sizes, prepare
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.tokenizers.gpt2 import gpt2_encoding

TEXTS = [f"Document {i}: the {'quick ' * (i % 7)}fox jumps over {i * i} dogs.\n" for i in range(60)]


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts))
    return path


def run_prepare(
    source: Path | str,
    out: Path,
    *,
    shard_tokens: int = 1_000_000,
    val_tokens: int | None = None,
    max_tokens: int | None = None,
    text_column: str = "text",
    num_workers: int | None = None,
    part: tuple[int, int] = (1, 1),
    skip_bad: bool = False,
) -> Result | None:
    return prepare(
        open_source(str(source), text_column=text_column, part=part),
        out,
        Sizes(shard_tokens, val_tokens, max_tokens),
        num_workers=num_workers,
        part=part,
        skip_bad=skip_bad,
    )


def stream_of(folder: Path) -> list[int]:
    """Return every token of a prepared folder in the order of the documents: validation comes first."""
    manifest = json.loads((folder / "shards.json").read_text())
    names = {
        split: sorted(file["name"] for file in manifest["files"] if file["split"] == split)
        for split in ("val", "train")
    }
    return [
        int(token) for name in (*names["val"], *names["train"]) for token in np.load(folder / name)
    ]


def expected_stream(texts: list[str]) -> list[int]:
    encoding = gpt2_encoding()
    return [token for text in texts for token in (50256, *encoding.encode_ordinary(text))]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }
