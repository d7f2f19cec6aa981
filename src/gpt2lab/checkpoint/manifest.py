"""What makes a folder a checkpoint: a manifest with the hash of every file and of itself. No torch, no pickle.

A name that exists is complete: `step_00000250/` appears by one rename, after every byte is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.errors import CheckpointError, system_errors_as
from gpt2lab.files import (
    COUNT,
    HASH,
    NUMBER,
    OBJECT,
    SIZE,
    STRING,
    TEXT,
    JsonFile,
    is_file_name,
    open_regular,
    or_null,
    sha256_of,
    sync_folder,
    write_durably,
)

FORMAT = "gpt2lab-checkpoint/1"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_REQUIRED = {
    "step": COUNT,
    "kind": TEXT,
    "tokens": COUNT,
    "created": NUMBER,
    "config": OBJECT,
    "data_fingerprint": TEXT,
    "environment": OBJECT,
    "files": OBJECT,
}
_OPTIONAL = {
    "run": STRING,
    "attempt": COUNT,
    "samples": COUNT,
    "val_loss": or_null(NUMBER),
    "best_val_loss": or_null(NUMBER),
    "order_version": COUNT,
    "average_from": or_null(COUNT),
    "tokenizer": OBJECT,
    **dict.fromkeys(("initial_weights", "branch_from"), or_null(OBJECT)),
}


def folder_name(step: int) -> str:
    """Name the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def is_folder_name(name: Any) -> bool:
    """Tell whether a value can be the name of a checkpoint's folder."""
    return isinstance(name, str) and re.fullmatch(r"step_[0-9]{8,}", name) is not None


@dataclass(frozen=True)
class Draft:
    """All that a checkpoint will hold: the parts of each file, in order, and the facts of its manifest."""

    step: int
    files: dict[str, list[bytes | memoryview]]
    facts: dict[str, Any]


def commit(run_dir: Path, draft: Draft, *, may_rename: Callable[[], object] = lambda: None) -> Path:
    """Write a checkpoint and commit it by one rename; return its folder. A step that is committed is left as it is.

    `may_rename` is called just before the rename, and may raise an error.

    Raises: OSError; then nothing has changed on disk, unless the step's folder exists: then only the flush of its name
    failed.
    """
    step, files = draft.step, {}
    committed = run_dir / folder_name(step)
    if committed.exists():
        return committed
    folder = run_dir / f".tmp-{step:08d}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()  # not the run's, which may have been moved meanwhile
    try:
        for name, parts in draft.files.items():
            faultpoint(f"checkpoint.{name}", step)
            size = sum(memoryview(part).nbytes for part in parts)
            files[name] = {"bytes": size, "sha256": write_durably(folder / name, *parts)}
        faultpoint(f"checkpoint.{MANIFEST}", step)
        manifest = {"format": FORMAT, **draft.facts, "files": files}
        manifest["manifest_sha256"] = _hash_of(manifest)
        text = json.dumps(manifest, indent=1, allow_nan=False)
        write_durably(folder / MANIFEST, text.encode())
        sync_folder(folder)
        faultpoint("checkpoint.before_rename", step)
        may_rename()
        os.rename(folder, committed)  # the commit; fails if the step is there
        faultpoint("checkpoint.after_rename", step)
        sync_folder(run_dir)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return committed


def _hash_of(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest after checking its own hash and the names in it.

    Raises: CheckpointError naming the file and what is wrong.
    """
    file = JsonFile(folder / MANIFEST, CheckpointError, at_most=MAX_MANIFEST_BYTES)
    manifest = check_manifest(file, file.read())
    if folder.name.startswith("step_") and folder.name != folder_name(manifest["step"]):
        raise CheckpointError(
            f"{folder}: holds step {manifest['step']}; a copied or renamed folder"
        )
    return manifest


def check_manifest(file: JsonFile, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest in a file after checking its own hash and the names in it.

    Raises: CheckpointError naming the file and what is wrong.
    """
    file.check(manifest, {"format": TEXT, "manifest_sha256": TEXT})
    if manifest["format"] != FORMAT:
        raise file.rejected(f"format {manifest['format']!r}, this version reads {FORMAT!r}")
    if manifest["manifest_sha256"] != _hash_of(manifest):
        raise file.rejected("damaged (its own hash does not match)")
    # A hostile file may carry a recomputed hash, so the values are checked too.
    file.check(manifest, _REQUIRED, _OPTIONAL)
    file.check(manifest["environment"], {"world_size": SIZE}, where="environment: ")
    if manifest.get("initial_weights"):
        file.check(manifest["initial_weights"], {"init_from": STRING}, where="initial_weights: ")
    for name, written in manifest["files"].items():
        if not is_file_name(name) or name.startswith("."):
            raise file.rejected(f"file name {name!r} is not a plain name")
        where = f"{name}: "
        file.check({name: written}, {name: OBJECT})
        file.check(written, {"bytes": COUNT, "sha256": HASH}, where=where)
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint against its manifest and return the manifest.

    Raises: CheckpointError naming the damaged file.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        with system_errors_as(CheckpointError, path):
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"{path}: damaged ({size} bytes, written as {expected['bytes']})"
                )
            found = sha256_of(path)
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged (sha256 does not match its manifest)")
    return manifest
