"""A small corpus of text, and what it becomes when it is prepared."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab.data.prepare.pipeline import Result, Sizes, prepare
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2, gpt2_encoding
from gpt2lab.tokenizers.interface import Tokenizer
from tiny import parse, pretrain

TEXTS = [f"Document {i}: the {'quick ' * (i % 7)}fox jumps over {i * i} dogs.\n" for i in range(60)]
MANY = [f"{i} " + TEXTS[i % len(TEXTS)] * (1 + i % 5) for i in range(400)]


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
    group_bytes: int = 1_000_000_000,
    text_column: str = "text",
    tokenizer: Tokenizer = GPT2,
    **more: Any,
) -> Result | None:
    sizes = Sizes(shard_tokens, val_tokens, max_tokens, group_bytes)
    opened = open_source(str(source), text_column=text_column)
    return prepare(opened, out, sizes, tokenizer=tokenizer, **more)


def prepare_parts(source: Path | str, folder: Path, count: int, **how: Any) -> list[Path]:
    """Prepare each part of a source on its own; return the folders `part1`, `part2` and so on."""
    folders = [folder / f"part{i}" for i in range(1, count + 1)]
    for i, part in enumerate(folders, start=1):
        run_prepare(source, part, part=(i, count), **how)
    return folders


def train_on(folder: Path, name: str, texts: list[str], tokenizer: Tokenizer, *flags: str) -> None:
    """Prepare texts with a tokenizer, and train the run `name` of two layers on them."""
    write_jsonl(folder / "corpus" / "a.jsonl", texts)
    run_prepare(folder / "corpus", folder / name, tokenizer=tokenizer)
    usual = [
        *("--n_layer=2", "--n_head=2", "--context_length=64", "--total_batch_size=256"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--mini_batch_size=2"),
        *(f"--data_dir={folder / name}", f"--checkpoint_dir={folder / 'runs'}"),
        *("--sample_freq=0", "--sample_prompt=", f"--run_name={name}"),
    ]
    pretrain(parse([*usual, *flags]))


def ids_of(folder: Path, split: str) -> list[int]:
    """Return the tokens of a split of a prepared folder."""
    manifest = json.loads((folder / "shards.json").read_text())
    names = sorted(file["name"] for file in manifest["files"] if file["split"] == split)
    return [int(token) for name in names for token in np.load(folder / name)]


def documents_of(folder: Path, split: str) -> list[tuple[int, ...]]:
    """Return the documents of a split, each with the <|endoftext|> before it."""
    ids = ids_of(folder, split)
    starts = [place for place, token in enumerate(ids) if token == END_OF_TEXT]
    assert starts[:1] == [0]
    return [tuple(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


def encoded(texts: list[str]) -> list[tuple[int, ...]]:
    """Return texts as documents."""
    encoding = gpt2_encoding()
    return [(END_OF_TEXT, *encoding.encode_ordinary(text)) for text in texts]


def assert_divided(folder: Path, texts: list[str]) -> None:
    """Assert that the splits hold these documents, each in the order of the source, and none in both."""
    train, val = (documents_of(folder, split) for split in ("train", "val"))
    held_out = set(val)
    assert held_out
    assert train
    assert train == [document for document in encoded(texts) if document not in held_out]
    assert val == [document for document in encoded(texts) if document in held_out]


def expected_stream(texts: list[str]) -> list[int]:
    return [token for document in encoded(texts) for token in document]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return what is in a folder, but for the states of source files, which are those of one machine."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if path.name != ".sources.json"
    }
