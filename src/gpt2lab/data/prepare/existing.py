"""Data sets made of shards that exist: parts from several machines, or shards of another program."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2lab.data.shards import (
    FORMAT,
    MANIFEST,
    RAW_SUFFIX,
    SPLITS,
    measure_shard,
    names_on_disk,
    open_shard,
    read_manifest,
    shard_name,
    write_manifest,
)
from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder
from gpt2lab.tokenizers import gpt2
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS


def merge(target: Path, parts: list[Path]) -> dict[str, Any]:
    """Join the parts 1/n ... n/n of one source into the new folder `target`; return its manifest.

    The shards follow in the order of the parts, whatever the order of the arguments, and each is compared with its
    hash. On one disk they are hard links: nothing is copied, and the parts can be deleted afterwards.

    Raises: DataError if a part is missing, damaged, given twice, or of another source.
    """
    if os.path.lexists(target):
        raise DataError(f"{target}: is there already; choose another folder")
    by_number = _in_order(parts)
    staging = target.with_name(f"{target.name}.partial")
    if os.path.lexists(staging):
        raise DataError(
            f"{staging}: is there already; unfinished work of another command, or delete it"
        )
    try:
        staging.mkdir(parents=True)
        files = _collect(staging, by_number)
        first = by_number[0][1]
        manifest = {
            **first,
            "request": {**first["request"], "part": [len(by_number), "merged"]},
            "documents": sum(part["documents"] for _, part in by_number),
            "left_out": {
                kind: sum(part["left_out"][kind] for _, part in by_number)
                for kind in first["left_out"]
            },
            "files": files,
        }
        write_manifest(staging, manifest)
        os.rename(staging, target)
        sync_folder(target.parent)
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written ({error.strerror}); nothing was kept"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def _in_order(parts: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the parts with their manifests by number, after checking that together they are complete."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    common, count = None, 0
    for folder in parts:
        manifest = read_manifest(folder)
        request = manifest.get("request", {})
        number, count = request.get("part", [1, 1])
        if count == 1 or count == "merged":
            raise DataError(f"{folder}: a full data set, not a part; prepare parts with --part i/n")
        same = (manifest["origin"], {**request, "part": None})
        if common is not None and same != common:
            raise DataError(f"{folder}: of another source or with other options than {parts[0]}")
        if number in found:
            raise DataError(f"{folder}: part {number}/{count} again, after {found[number][0]}")
        common, found[number] = same, (folder, manifest)
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in found]
    if missing:
        raise DataError(f"part {', '.join(missing)} is missing; give all {count}")
    return [found[number] for number in sorted(found)]


def _collect(staging: Path, parts: list[tuple[Path, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Link or copy every shard under its new number and compare it with its hash."""
    files = []
    total = sum(len(part["files"]) for _, part in parts)
    with tqdm(total=total, unit="file", leave=False) as bar:
        for split in SPLITS:
            listed = [(f, e) for f, part in parts for e in part["files"] if e["split"] == split]
            for index, (folder, entry) in enumerate(listed):
                path = staging / shard_name(parts[0][1]["dataset"], split, index)
                source = folder / entry["name"]
                shard = open_shard(source)
                try:
                    os.link(source, path)
                except OSError:  # another disk, or one without links
                    shutil.copyfile(source, path)
                if measure_shard(path, offset=shard.offset)["sha256"] != entry["sha256"]:
                    raise DataError(f"{source}: damaged (its sha256 is not the one in {MANIFEST})")
                files.append({**entry, "name": path.name})
                bar.update()
    return files


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
