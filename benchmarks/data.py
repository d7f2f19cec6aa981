"""Data preparation and loading, beside tiktoken alone and the tutorial lineage's way of preparing.

Each measurement is a process of its own on the same text, one after the other, round by round.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.token_stream import texts_of_stdlib
from gpt2lab import fmt
from gpt2lab.data.prepare.pipeline import Sizes, prepare
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2, gpt2_encoding

_SHARD_TOKENS = 10_000_000
_TUTORIAL_CHUNK = 16  # documents handed to a process at once, as there


def compare_preparation(*, megabytes: int, rounds: int, workers: tuple[int, ...]) -> dict[str, Any]:
    """Return tokens/s of each way of preparing `megabytes` of Python's library, `rounds` times in turns.

    `tiktoken` encodes documents that are in memory already, with one thread. The others begin with a .jsonl file
    and end with shards on the disk; starting their processes is in the time.
    """
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        _write_corpus(corpus, megabytes * 1_000_000)
        ways: dict[str, tuple[Callable[..., tuple[int, float]], tuple[int, ...]]] = {
            "tiktoken, one thread": (_tiktoken, ())
        }
        for count in workers:
            ways[f"gpt2lab, {count} processes"] = (_ours, (count,))
            ways[f"tutorial, {count} processes"] = (_tutorial, (count,))
        rates: dict[str, list[float]] = {name: [] for name in ways}
        tokens = 0
        for _ in range(rounds):
            for name, (way, arguments) in ways.items():
                with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                    found, seconds = fresh.submit(way, corpus, *arguments).result()
                assert tokens in (0, found), f"{name} found {found} tokens, another way {tokens}"
                tokens = found
                rates[name].append(tokens / seconds)
    alone = statistics.median(rates["tiktoken, one thread"])
    return {
        "cores": os.cpu_count(),
        "megabytes": megabytes,
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_second": {
            name: {"median": statistics.median(r), "min": min(r), "max": max(r)}
            for name, r in rates.items()
        },
        "times_tiktoken": {name: statistics.median(r) / alone for name, r in rates.items()},
    }


def measure_loader() -> dict[str, Any]:
    """Return tokens/s of fetching global batches of gpt2 (512 windows of 1024) from warm cache, and seconds each."""
    import torch  # and what imports it: the processes that prepare data start without it

    from gpt2lab.config.derived import BatchPlan
    from gpt2lab.data.loader import Loader
    from gpt2lab.data.order import Order
    from gpt2lab.data.shards import open_data
    from gpt2lab.data.windows import WindowReader

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = (np.arange(50_000_000) % END_OF_TEXT).astype(np.uint16)
        for split in ("train", "val"):
            np.save(folder / f"any_{split}_000000.npy", ids)
        shards = open_data(folder, vocab_size=50304).splits["train"]
        found = {}
        for shuffle in ("shards", "windows"):
            order = Order([s.tokens for s in shards], context_length=1024, shuffle=shuffle, seed=1)
            reader = WindowReader(shards, context_length=1024, id_limit=50257)
            plan = BatchPlan(512, 16, 32, 1, 1024)
            loader = Loader(order, reader, plan, rank=0, device=torch.device("cpu"))
            seconds = []
            for number in range(60):
                began = time.perf_counter()
                loader.fetch(512 * number)
                seconds.append(time.perf_counter() - began)
            reader.close()
            middle = statistics.median(seconds[5:])
            found[shuffle] = {"tokens_per_second": 512 * 1024 / middle, "batch_seconds": middle}
    return found


def describe(preparation: dict[str, Any], loader: dict[str, Any]) -> str:
    """Write both measurements as tables."""
    rows = [
        [
            name,
            f"{rate['median']:,.0f}",
            f"{rate['min']:,.0f}",
            f"{rate['max']:,.0f}",
            f"{ratio:.2f}",
        ]
        for (name, rate), ratio in zip(
            preparation["tokens_per_second"].items(),
            preparation["times_tiktoken"].values(),
            strict=True,
        )
    ]
    head = (
        f"preparation of {preparation['megabytes']} MB of text, {preparation['tokens']:,} tokens, on "
        f"{preparation['cores']} cores, median of {preparation['rounds']} rounds"
    )
    batches = [
        [
            f"--shuffle {name}",
            f"{f['tokens_per_second'] / 1e6:,.0f}",
            f"{f['batch_seconds'] * 1e3:.2f}",
        ]
        for name, f in loader.items()
    ]
    return "\n".join(
        [
            head,
            fmt.table(("", "tokens/s", "least", "most", "x tiktoken"), rows),
            "",
            "loader, batches of 524,288 tokens, one process, warm cache",
            fmt.table(("", "million tokens/s", "ms a batch"), batches),
        ]
    )


def _write_corpus(path: Path, num_bytes: int) -> None:
    # The tutorial's way keeps empty documents, ours does not.
    texts = [text for text in texts_of_stdlib() if text]
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            for text in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += len(text)
                if written >= num_bytes:
                    break


def _read(corpus: Path) -> list[str]:
    with open(corpus, encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def _tiktoken(corpus: Path) -> tuple[int, float]:
    texts, encoding = _read(corpus), gpt2_encoding()
    began = time.perf_counter()
    tokens = len(texts)
    for first in range(0, len(texts), 256):  # all at once, its lists alone would fill the memory
        batch = encoding.encode_ordinary_batch(texts[first : first + 256], num_threads=1)
        tokens += sum(map(len, batch))
    return tokens, time.perf_counter() - began


def _ours(corpus: Path, workers: int) -> tuple[int, float]:
    began = time.perf_counter()
    result = prepare(
        open_source(str(corpus), text_column="text"),
        corpus.parent / f"ours_{os.getpid()}",
        Sizes(shard_tokens=_SHARD_TOKENS),
        num_workers=workers,
        tokenizer=GPT2,
    )
    assert result is not None
    held_back = result.manifest["split"]["held_back_tokens"]  # tokenized, but in neither split
    return result.total("tokens") + held_back, time.perf_counter() - began


def _tutorial(corpus: Path, workers: int) -> tuple[int, float]:
    """Tokenize by documents in a pool, into one array of a shard's size, saved whenever it is full."""
    began = time.perf_counter()
    shard, filled, total, count = np.empty(_SHARD_TOKENS, np.uint16), 0, 0, 0
    with get_context("spawn").Pool(workers) as pool:
        for ids in pool.imap(_tokenize, _read(corpus), chunksize=_TUTORIAL_CHUNK):
            total += len(ids)
            while len(ids):
                taken = ids[: _SHARD_TOKENS - filled]
                shard[filled : filled + len(taken)] = taken
                filled, ids = filled + len(taken), ids[len(taken) :]
                if filled == _SHARD_TOKENS:
                    np.save(corpus.parent / f"tutorial_{os.getpid()}_{count}.npy", shard)
                    filled, count = 0, count + 1
        np.save(corpus.parent / f"tutorial_{os.getpid()}_{count}.npy", shard[:filled])
    return total, time.perf_counter() - began


def _tokenize(text: str) -> np.ndarray:
    ids = [END_OF_TEXT, *gpt2_encoding().encode_ordinary(text)]
    return np.array(ids).astype(np.uint16)
