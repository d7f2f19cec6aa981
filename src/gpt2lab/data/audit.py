"""What is in a folder of shards, and is it still what was written?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2lab import fmt, paths
from gpt2lab.data.shard_writer import measure_shard
from gpt2lab.data.shards import (
    MANIFEST,
    SPLITS,
    Shard,
    find_strays,
    open_data,
    open_shard,
    read_manifest,
)
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, NUM_TOKENS


def verify(folder: Path) -> list[str]:
    """Read every byte and return a line for each file that is not what shards.json says; empty if all is well.

    Raises: DataError if there is no shards.json to compare with, or it is damaged itself.
    """
    if not (folder / MANIFEST).exists():
        raise DataError(
            f"{folder}: no {MANIFEST} to compare with; python scripts/data.py import writes one"
        )
    manifest = read_manifest(folder)
    # Hashing leaves Python's lock alone, so threads use all cores.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda file: _find_damage(folder, file), manifest["files"])
        bar = tqdm(
            zip(manifest["files"], results, strict=True),
            total=len(manifest["files"]),
            unit="file",
            leave=False,
        )
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
    """Figures of one split; document lengths in tokens, with their <|endoftext|>."""

    shards: int
    tokens: int
    largest_id: int
    text_bytes: int | None  # None where an id is none of GPT-2's
    lengths: (
        np.ndarray
    )  # (documents,) int64; a document that continues in the next shard counts once


def measure(folder: Path) -> dict[str, SplitStats]:
    """Read every token of a folder and return the figures of its splits.

    Raises: DataError.
    """
    data = open_data(folder, vocab_size=2**16)
    return {split: _measure_split(data.splits[split]) for split in SPLITS}


def _measure_split(shards: tuple[Shard, ...]) -> SplitStats:
    tokens, largest, text_bytes = 0, 0, 0
    unknown = False
    begins: list[np.ndarray] = []
    for shard in tqdm(shards, unit="shard", leave=False):
        ids = np.memmap(shard.path, "<u2", mode="r", offset=shard.offset, shape=(shard.tokens,))
        begins.append(np.flatnonzero(ids == END_OF_TEXT) + tokens)
        facts = measure_shard(shard.path, offset=shard.offset)
        largest = max(largest, facts["max_id"])
        unknown |= facts["text_bytes"] is None
        text_bytes += facts["text_bytes"] or 0
        tokens += shard.tokens
    edges = np.concatenate([*begins, [tokens]])
    return SplitStats(
        shards=len(shards),
        tokens=tokens,
        largest_id=largest,
        text_bytes=None if unknown else text_bytes,
        lengths=np.diff(edges),
    )


def describe(folder: Path, stats: dict[str, SplitStats]) -> str:
    """Write the figures as a table, a column for each split."""
    rows = list(_rows(stats))
    return f"{paths.for_people(folder)}\n" + fmt.table(["", *stats], rows)


def _rows(stats: dict[str, SplitStats]) -> Iterator[list[str]]:
    def row(name: str, value: Any) -> list[str]:
        return [name, *(value(split) for split in stats.values())]

    def of_lengths(figure: Any) -> Any:
        return lambda s: f"{figure(s.lengths):,.0f}" if len(s.lengths) else "n/a"

    yield row("shards", lambda s: f"{s.shards:,}")
    yield row("tokens", lambda s: f"{s.tokens:,}")
    yield row("documents", lambda s: f"{len(s.lengths):,}")
    yield row("text", lambda s: "n/a" if s.text_bytes is None else fmt.num_bytes(s.text_bytes))
    yield row(
        "bytes per token",
        lambda s: "n/a" if s.text_bytes is None else f"{s.text_bytes / s.tokens:.3f}",
    )
    yield row("document, mean", of_lengths(np.mean))
    yield row("document, median", of_lengths(np.median))
    yield row("document, 90 %", of_lengths(lambda lengths: np.quantile(lengths, 0.9)))
    yield row("document, longest", of_lengths(np.max))
    yield row(
        "largest id",
        lambda s: f"{s.largest_id:,}" + ("" if s.largest_id < NUM_TOKENS else " (not GPT-2's)"),
    )
    for context_length in (256, 1024):
        yield row(
            f"windows of {context_length}",
            lambda s, T=context_length: f"{(s.tokens - s.shards) // T:,}",
        )
