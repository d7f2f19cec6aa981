"""Parts that several machines prepared -> one folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2lab.data.shard_writer import measure_shard
from gpt2lab.data.shards import (
    MANIFEST,
    SPLITS,
    fingerprint_of,
    open_shard,
    read_manifest,
    shard_name,
)
from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder, write_durably


def merge(target: Path, parts: list[Path]) -> dict[str, Any]:
    """Join the parts 1/n ... n/n of one source into the new folder `target`; return its manifest.

    Shards follow in the order of the parts, whatever the order of the arguments; each is compared with its hash on
    the way. On one disk they are hard links: nothing is copied, and the parts can be deleted afterwards.

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
        manifest["fingerprint"] = fingerprint_of(manifest)
        write_durably(staging / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        sync_folder(staging)
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
    """Return the parts with their manifests by number, after checking that together they are one whole."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    common, count = None, 0
    for folder in parts:
        manifest = read_manifest(folder)
        request = manifest.get("request", {})
        number, count = request.get("part", [1, 1])
        if count == 1 or count == "merged":
            raise DataError(f"{folder}: a whole, not a part; prepare parts with --part i/n")
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
    bar = tqdm(total=sum(len(part["files"]) for _, part in parts), unit="file", leave=False)
    with bar:
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
