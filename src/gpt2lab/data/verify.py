"""Checks of a folder of shards: every byte against shards.json, and statistics of its documents."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2lab import fmt, paths
from gpt2lab.data.shards import (
    MANIFEST,
    SPLITS,
    Shard,
    find_strays,
    measure_shard,
    open_data,
    open_shard,
    read_manifest,
)
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, NUM_TOKENS


def verify(folder: Path) -> list[str]:
    """Read every byte and return a line for each file that differs from shards.json; empty if none does.

    Raises: DataError if there is no shards.json to compare with, or it is damaged itself.
    """
    if not (folder / MANIFEST).exists():
        raise DataError(
            f"{folder}: no {MANIFEST} to compare with; python scripts/data.py import writes one"
        )
    manifest = read_manifest(folder)
    files = manifest["files"]
    # Hashing releases Python's lock, so threads use all cores.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = zip(files, pool.map(lambda f: _find_damage(folder, f), files), strict=True)
        bar = tqdm(results, total=len(files), unit="file", leave=False)
        problems = [f"{folder / file['name']}: {damage}" for file, damage in bar if damage]
    strays = find_strays(folder, manifest)
    return problems + [f"{folder / name}: not listed in {MANIFEST}" for name in strays]


def _find_damage(folder: Path, listed: dict[str, Any]) -> str | None:
    path = folder / listed["name"]
    try:
        shard = open_shard(path)
        found = {"tokens": shard.tokens, **measure_shard(path, offset=shard.offset)}
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    for fact in ("tokens", "bytes", "max_id", "sha256"):
        if found[fact] != listed[fact]:
            return f"{fact} is {found[fact]}, {MANIFEST} says {listed[fact]}"
    return None


@dataclass(frozen=True)
class SplitStats:
    """Statistics of one split.

    `lengths` (documents,) int64: tokens of each document, with its <|endoftext|>; one that continues in the next
    shard counts once.
    """

    shards: int
    tokens: int
    largest_id: int
    text_bytes: int | None  # None where an id is not GPT-2's
    lengths: np.ndarray


def measure(folder: Path) -> dict[str, SplitStats]:
    """Read every token of a folder and return the statistics of its splits.

    Raises: DataError.
    """
    data = open_data(folder, vocab_size=2**16)
    return {split: _measure_split(data.splits[split]) for split in SPLITS}


def _measure_split(shards: tuple[Shard, ...]) -> SplitStats:
    tokens = 0
    facts: list[dict[str, Any]] = []
    begins: list[np.ndarray] = []
    for shard in tqdm(shards, unit="shard", leave=False):
        ids = np.memmap(shard.path, "<u2", mode="r", offset=shard.offset, shape=(shard.tokens,))
        begins.append(np.flatnonzero(ids == END_OF_TEXT) + tokens)
        facts.append(measure_shard(shard.path, offset=shard.offset))
        tokens += shard.tokens
    text_bytes = [fact["text_bytes"] for fact in facts]
    return SplitStats(
        shards=len(shards),
        tokens=tokens,
        largest_id=max(fact["max_id"] for fact in facts),
        text_bytes=None if None in text_bytes else sum(text_bytes),
        lengths=np.diff(np.concatenate([*begins, [tokens]])),
    )


def describe(folder: Path, stats: dict[str, SplitStats]) -> str:
    """Write the statistics as a table, a column for each split."""
    columns = [_column(split) for split in stats.values()]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return f"{paths.for_people(folder)}\n" + fmt.table(["", *stats], rows)


def _column(split: SplitStats) -> dict[str, str]:
    tokens, lengths, text = split.tokens, split.lengths, split.text_bytes
    kinds, length = ("mean", "median", "90 %", "longest"), ["n/a"] * 4
    if len(lengths):
        figures = [lengths.mean(), *np.quantile(lengths, [0.5, 0.9, 1.0])]
        length = [f"{figure:,.0f}" for figure in figures]
    return {
        "shards": f"{split.shards:,}",
        "tokens": f"{tokens:,}",
        "documents": f"{len(lengths):,}",
        "text": "n/a" if text is None else fmt.num_bytes(text),
        "bytes per token": "n/a" if text is None else f"{text / tokens:.3f}",
        **{f"document, {kind}": value for kind, value in zip(kinds, length, strict=True)},
        "largest id": f"{split.largest_id:,}"
        + ("" if split.largest_id < NUM_TOKENS else " (not GPT-2's)"),
        **{f"windows of {T}": f"{(tokens - split.shards) // T:,}" for T in (256, 1024)},
    }
