"""Data sets made of shards of another program."""

from __future__ import annotations

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
from gpt2lab.tokenizers import gpt2
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS


def adopt(folder: Path) -> dict[str, Any]:
    """Write and return shards.json for the shards of another program; nothing is copied.

    Reads every `DATASET_train_000001.npy` and the like in the order of their numbers, else nanoGPT's `train.bin` and
    `val.bin`. The ids count as GPT-2's, unless nanoGPT's `meta.pkl` says that they are characters.

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
    is_gpt2 = not (folder / "meta.pkl").exists()
    files = [_measure(folder / name, split, is_gpt2) for split in SPLITS for name in names[split]]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "dataset": folder.resolve().name,
        "origin": "shards written by another program",
        "tokenizer": {
            "name": gpt2.NAME if is_gpt2 else gpt2.UNKNOWN,
            "sha256": gpt2.VOCABULARY_HASH if is_gpt2 else None,
        },
        "documents": sum(file["documents"] for file in files),
        "files": files,
    }
    try:
        write_manifest(folder, manifest)
    except OSError as error:
        (folder / MANIFEST).unlink(missing_ok=True)
        raise DataError(f"{folder / MANIFEST}: cannot be written ({error.strerror})") from error
    return manifest


def _measure(path: Path, split: str, is_gpt2: bool) -> dict[str, Any]:
    """Return the manifest's entry of a shard of another program."""
    shard = open_shard(path)
    if shard.tokens == 0:
        raise DataError(f"{path}: empty")
    facts = measure_shard(path, offset=shard.offset)
    if facts["max_id"] >= NUM_TOKENS:
        raise DataError(
            f"{path}: token id {facts['max_id']}, GPT-2's end at {NUM_TOKENS - 1}; "
            f"another tokenizer, or not uint16 tokens"
        )
    if not is_gpt2:  # another tokenizer's ids mean neither GPT-2's documents nor its text
        facts |= {"documents": 0, "text_bytes": None}
    return {"name": path.name, "split": split, "tokens": shard.tokens, **facts}
