"""A tiny corpus of ids with awkward shard sizes, as foreign shards: no text, no manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VOCAB = 256
CONTEXT = 16
TRAIN_SHARDS = (1003, 777, 1290)  # none a multiple of T + 1, so every shard end is awkward
VAL_SHARDS = (650,)


def make_tokens(count: int, seed: int) -> np.ndarray:
    """Return ids with something to learn: each is often the one before plus a constant."""
    rng = np.random.RandomState(seed)
    jumps = np.where(rng.rand(count) < 0.8, 3, rng.randint(0, VOCAB, count))
    return (np.cumsum(jumps) % VOCAB).astype(np.uint16)


def write_shards(folder: Path, *, train: tuple[int, ...], val: tuple[int, ...]) -> Path:
    """Write foreign shards (no shards.json) of the given lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sizes in (("train", train), ("val", val)):
        for index, size in enumerate(sizes):
            tokens = make_tokens(size, seed=1000 * len(split) + index)
            np.save(folder / f"tiny_{split}_{index:06d}.npy", tokens)
    return folder
