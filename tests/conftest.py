"""Shared fixtures: a tiny corpus of awkward shard sizes and the flags of a tiny model over it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from corpora import TEXTS, run_prepare, write_jsonl

# Bits depend on the number of threads, and torchrun gives each of its processes one.
torch.set_num_threads(1)

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


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three training shards and one for validation; treat as read-only."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    return write_shards(folder, train=TRAIN_SHARDS, val=VAL_SHARDS)


@pytest.fixture
def tiny_flags(tiny_data: Path, tmp_path: Path) -> list[str]:
    """Return the command line of a run that takes milliseconds a step: 2 layers, 32 wide, T = 16, S = 8."""
    return [
        *("--n_layer=2", "--n_head=2", "--n_embd=32", f"--context_length={CONTEXT}"),
        *(f"--vocab_size={VOCAB}", "--total_batch_size=128", "--mini_batch_size=2"),
        *(f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path / 'runs'}", "--run_name=tiny"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--log_freq=1000", "--val_tokens=320"),
    ]


@pytest.fixture(scope="session")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a few dozen short documents; treat as read-only."""
    folder = tmp_path_factory.mktemp("prepared")
    run_prepare(write_jsonl(folder / "tiny.jsonl", TEXTS), folder / "tiny", val_tokens=100)
    return folder / "tiny"


@pytest.fixture
def prepared(prepared_once: Path, tmp_path: Path) -> Path:
    """Return a copy of them to spoil."""
    return Path(shutil.copytree(prepared_once, tmp_path / "prepared"))
