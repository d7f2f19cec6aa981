"""Data sets made of shards of another program."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from gpt2lab.data.shards import (
    FORMAT,
    MANIFEST,
    RAW_SUFFIX,
    SPLITS,
    measure_shard,
    names_on_disk,
    open_shard,
    write_manifest,
)
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import record_of
from gpt2lab.tokenizers.plain import META_FILE, read_characters


def adopt(folder: Path) -> dict[str, Any]:
    """Write and return shards.json for the shards of another program; nothing is copied.

    Reads every `DATASET_train_000001.npy` and the like in the order of their numbers, else nanoGPT's `train.bin` and
    `val.bin`. The ids count as GPT-2's, unless nanoGPT's `meta.pkl` lies beside them: then they are its characters, or
    of an unknown tokenizer if it does not say which characters.

    Raises: DataError if there is a manifest already, a split is missing, or a file is not what it should be.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if (folder / MANIFEST).exists():
        raise DataError(
            f"{folder / MANIFEST}: is there already; check it with scripts/data.py verify"
        )
    names = {split: names_on_disk(folder, split) for split in SPLITS}
    if not any(names.values()):
        names = {
            s: [s + RAW_SUFFIX] if (folder / (s + RAW_SUFFIX)).exists() else [] for s in SPLITS
        }
    for split in SPLITS:
        if not names[split]:
            wanted = f"NAME_{split}_000000.npy or {split}{RAW_SUFFIX}"
            raise DataError(f"{folder}: no {split} shards ({wanted}); training needs both splits")
    tokenizer = _tokenizer_of(folder)
    files = [_measure(folder / name, split, tokenizer) for split in SPLITS for name in names[split]]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "dataset": folder.resolve().name,
        "origin": "shards written by another program",
        "tokenizer": record_of(tokenizer),
        "documents": sum(file["documents"] for file in files),
        "files": files,
    }
    try:
        write_manifest(folder, manifest)
    except OSError as error:
        (folder / MANIFEST).unlink(missing_ok=True)
        raise DataError(f"{folder / MANIFEST}: cannot be written ({error.strerror})") from error
    return manifest


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    if not (folder / META_FILE).exists():
        return GPT2
    with contextlib.suppress(DataError):
        return read_characters(folder / META_FILE)
    return None


def _measure(path: Path, split: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the manifest's entry of a shard of another program."""
    shard = open_shard(path)
    if shard.tokens == 0:
        raise DataError(f"{path}: empty")
    facts = measure_shard(path, offset=shard.offset, tokenizer=tokenizer, dtype=shard.dtype)
    if tokenizer is not None and facts["max_id"] >= tokenizer.size:
        raise DataError(
            f"{path}: token id {facts['max_id']}, {tokenizer.title}'s end at {tokenizer.size - 1}; "
            f"another tokenizer, or not uint16 tokens"
        )
    return {"name": path.name, "split": split, "tokens": shard.tokens, **facts}
