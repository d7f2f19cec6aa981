"""Checks of a folder of shards: every byte against shards.json, and statistics of its documents."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2lab import fmt, paths
from gpt2lab.data.manifest import (
    MANIFEST,
    SPLITS,
    EndOfText,
    no_shards,
    read_manifest,
    shards_folder,
    shares_of,
    tokenizer_of,
)
from gpt2lab.data.prepare.sources import TextSource
from gpt2lab.data.prepare.work import changed_files
from gpt2lab.data.prepare.write import measure_shard
from gpt2lab.data.shards import (
    Shard,
    TokenData,
    document_ends,
    document_marks,
    find_strays,
    open_data,
    open_listed,
)
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.interface import Tokenizer

_BLOCK = 1 << 22  # tokens


def verify(folder: Path) -> list[str]:
    """Read every byte and return a line for each file that differs from shards.json; empty if none does.

    Raises: DataError if there is no such folder, or no shards.json to compare with, or it is damaged itself.
    """
    if not folder.is_dir():
        raise no_shards(folder, "no such data folder", "gpt2lab prepare makes one")
    if not (folder / MANIFEST).exists():
        problem = f"no {MANIFEST} to compare with"
        raise no_shards(folder, problem, "gpt2lab data import writes one")
    manifest = read_manifest(folder)
    files, place, problems = manifest["files"], shards_folder(folder, manifest), []
    try:
        tokenizer_of(folder)
    except DataError as error:
        problems.append(str(error))
    # Hashing releases Python's lock, so threads use all cores.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = zip(files, pool.map(lambda f: _find_damage(place, f), files), strict=True)
        bar = tqdm(results, total=len(files), unit="file", leave=False, disable=None)
        problems += [f"{place / file['name']}: {damage}" for file, damage in bar if damage]
    strays = find_strays(folder, manifest)
    return problems + [f"{place / name}: not listed in {MANIFEST}" for name in strays]


def compare_sources(folder: Path, source: TextSource) -> list[str]:
    """Hash the source's files and return a line for each that is not what the folder was prepared from.

    Raises: DataError if the folder records no hashes of them.
    """
    manifest = read_manifest(folder)
    shares = shares_of(manifest) if "content" in manifest else []
    if not any(digest for *_, digest in shares):
        raise DataError(
            f"{folder}: {MANIFEST} has no hashes of source files: of the Hub, imported, or of an earlier version"
        )
    changed = changed_files(source.files, shares, {})
    return [f"{name}: not the file that was prepared" for name in changed]


def _find_damage(folder: Path, listed: dict[str, Any]) -> str | None:
    path = folder / listed["name"]
    try:
        shard = open_listed(folder, listed)
        facts = measure_shard(path, offset=shard.offset, dtype=shard.dtype)
        found = {"tokens": shard.tokens, **facts}
        if shard.index is not None:
            document_ends(shard)
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    for fact in ("tokens", "bytes", "max_id", "sha256"):
        if found[fact] != listed[fact]:
            return f"{fact} is {found[fact]}, {MANIFEST} says {listed[fact]}"
    return None


NGRAM = 16  # tokens
_GRAMS = 1_000_000  # of the validation split that are looked for
_FILTER_BITS = 26


def measure_overlap(data: TokenData) -> float | None:
    """Return the share of the validation split's 16-grams that occur in training, by a million of them at most.

    Texts share licences and idioms, so it is not zero for a clean split; far above that of other training documents, it
    means that validation has been seen. Shorter documents are not looked for; None if all are shorter. Reads each split
    once, in little memory.

    Raises: DataError if a shard cannot be read.
    """
    end, stride = data.end_of_text.id, -(-data.tokens("val") // _GRAMS)
    wanted = np.concatenate(
        [_hash_ngrams(ids, end)[::stride].copy() for ids in _blocks(data.splits["val"])]
    )
    distinct, counts = np.unique(wanted, return_counts=True)
    found = np.zeros(len(distinct), dtype=bool)
    may_occur = np.zeros(1 << _FILTER_BITS, dtype=bool)
    shift = np.uint64(64 - _FILTER_BITS)
    may_occur[distinct >> shift] = True
    for ids in tqdm(_blocks(data.splits["train"]), unit="block", leave=False, disable=None):
        grams = _hash_ngrams(ids, end)
        grams = grams[may_occur[grams >> shift]]
        if len(grams) and len(distinct):
            places = np.minimum(np.searchsorted(distinct, grams), len(distinct) - 1)
            found[places[distinct[places] == grams]] = True
    return float(counts[found].sum() / len(wanted)) if len(wanted) else None


def _blocks(shards: tuple[Shard, ...]) -> Iterator[np.ndarray]:
    """Yield the ids of shards in blocks that overlap, so that no n-gram within a shard is missed."""
    for shard in shards:
        for begin in range(0, shard.tokens, _BLOCK):
            end = min(shard.tokens, begin + _BLOCK + NGRAM - 1)
            yield shard.map_ids()[begin:end]


def _hash_ngrams(ids: np.ndarray, end_of_text: int | None) -> np.ndarray:
    """Return 64-bit hashes of the n-grams that lie within a document, (m,) uint64.

    A polynomial over scrambled ids: as many places as fit are doubled four times.
    """
    grams = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    grams ^= grams >> np.uint64(29)
    factor, width = 0xBF58476D1CE4E5B9, 1
    while width < NGRAM:
        grams = grams[:-width] * np.uint64(factor) + grams[width:]
        factor, width = factor * factor % 2**64, 2 * width
    grams = grams * np.uint64(0x94D049BB133111EB)
    if end_of_text is None:
        return grams
    ends = np.concatenate([[0], np.cumsum(ids == end_of_text)])
    return grams[ends[NGRAM : NGRAM + len(grams)] == ends[1 : 1 + len(grams)]]


@dataclass(frozen=True)
class SplitStats:
    """Statistics of one split.

    `lengths` (documents,) int64: tokens of each document, with its end-of-text id; one that continues in the next
    shard counts once.
    """

    shards: tuple[int, ...]  # tokens of each
    largest_id: int
    text_bytes: int | None  # None where the text of an id is not known
    tokenizer: Tokenizer | None
    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        """Count the tokens of all shards."""
        return sum(self.shards)


def measure(folder: Path) -> dict[str, SplitStats]:
    """Read every token of a folder and return the statistics of its splits.

    Raises: DataError.
    """
    data = open_data(folder, vocab_size=None)
    return {
        split: _measure_split(data.splits[split], data.end_of_text, data.tokenizer)
        for split in SPLITS
    }


def _measure_split(
    shards: tuple[Shard, ...], end_of_text: EndOfText, tokenizer: Tokenizer | None
) -> SplitStats:
    tokens = 0
    facts: list[dict[str, Any]] = []
    bounds: list[np.ndarray] = []  # between documents
    for shard in tqdm(shards, unit="shard", leave=False, disable=None):
        is_before = shard.index is None and end_of_text.place == "before"
        bounds.append(document_marks(shard, end_of_text.id) + tokens + (0 if is_before else 1))
        facts.append(
            measure_shard(shard.path, offset=shard.offset, dtype=shard.dtype, tokenizer=tokenizer)
        )
        tokens += shard.tokens
    # Tokens before the first id, or after the last one, belong to no document.
    ends = np.array([tokens] if end_of_text.place == "before" else [], np.int64)
    starts = np.array([] if end_of_text.place == "before" else [0], np.int64)
    text_bytes = [fact["text_bytes"] for fact in facts]
    return SplitStats(
        shards=tuple(shard.tokens for shard in shards),
        largest_id=max(fact["max_id"] for fact in facts),
        text_bytes=None if None in text_bytes else sum(text_bytes),
        lengths=np.diff(np.concatenate([starts, *bounds, ends])),
        tokenizer=tokenizer,
    )


def stats_table(folder: Path, stats: dict[str, SplitStats]) -> str:
    """Write the statistics as a table, a column for each split."""
    columns = [_column(split) for split in stats.values()]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return f"{paths.display_path(folder)}\n" + fmt.table(["", *stats], rows)


def _column(split: SplitStats) -> dict[str, str]:
    tokens, lengths, text = split.tokens, split.lengths, split.text_bytes
    kinds, length = ("mean", "median", "90 %", "longest"), ["n/a"] * 4
    if len(lengths):
        figures = [lengths.mean(), *np.quantile(lengths, [0.5, 0.9, 1.0])]
        length = [f"{figure:,.0f}" for figure in figures]
    return {
        "shards": f"{len(split.shards):,}",
        "tokens": f"{tokens:,}",
        "documents": f"{len(lengths):,}",
        "text": "n/a" if text is None else fmt.num_bytes(text),
        "bytes per token": "n/a" if text is None else f"{text / tokens:.3f}",
        **{f"document, {kind}": value for kind, value in zip(kinds, length, strict=True)},
        "tokenizer": "not known" if split.tokenizer is None else split.tokenizer.title,
        "largest id": f"{split.largest_id:,}",
        **{
            f"windows of {T}": f"{sum(max(n - 1, 0) // T for n in split.shards):,}"
            for T in (256, 1024)
        },
    }
