"""A manifest for shards that other programs wrote: the edufineweb lineage's .npy, nanoGPT's .bin. Nothing is copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpt2lab.data.shard_writer import measure_shard
from gpt2lab.data.shards import (
    FORMAT,
    MANIFEST,
    RAW_SUFFIX,
    SPLITS,
    fingerprint_of,
    names_on_disk,
    open_shard,
)
from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder, write_durably
from gpt2lab.tokenizers import gpt2
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS


def adopt(folder: Path) -> dict[str, Any]:
    """Read every shard in `folder`, write shards.json beside them, and return it.

    `DATASET_train_000001.npy` and the like are taken in the order of their numbers; else `train.bin` and `val.bin`.
    The ids are taken to be GPT-2's, unless nanoGPT's `meta.pkl` says that they are characters.

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
    files = []
    for split in SPLITS:
        for name in names[split]:
            shard = open_shard(folder / name)
            if shard.tokens == 0:
                raise DataError(f"{folder / name}: empty")
            facts = measure_shard(shard.path, offset=shard.offset)
            if facts["max_id"] >= NUM_TOKENS:
                raise DataError(
                    f"{folder / name}: token id {facts['max_id']}, GPT-2's end at {NUM_TOKENS - 1}; "
                    f"another tokenizer, or not uint16 tokens"
                )
            files.append({"name": name, "split": split, "tokens": shard.tokens, **facts})
    is_gpt2 = not (folder / "meta.pkl").exists()
    if not is_gpt2:  # what a character's code is as a GPT-2 id, means nothing
        files = [{**file, "documents": 0, "text_bytes": None} for file in files]
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
    manifest["fingerprint"] = fingerprint_of(manifest)
    try:
        write_durably(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        sync_folder(folder)
    except OSError as error:
        (folder / MANIFEST).unlink(missing_ok=True)
        raise DataError(f"{folder / MANIFEST}: cannot be written ({error.strerror})") from error
    return manifest
