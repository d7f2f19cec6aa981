"""What makes a folder a checkpoint: a manifest with the hash of every file and of itself. No torch, no pickle.

A name that exists is complete: `step_00000250/` appears by one rename, after every byte is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.errors import CheckpointError
from gpt2lab.files import sha256_of, sync_folder, write_durably

FORMAT = "gpt2lab-checkpoint/1"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_REQUIRED = {"format", "step", "kind", "tokens", "created", "files", "config", "manifest_sha256"}


def folder_name(step: int) -> str:
    """Name the folder of a step's checkpoint."""
    return f"step_{step:08d}"


class Staging:
    """A checkpoint before its commit, in a folder without a checkpoint's name."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.files: dict[str, dict[str, Any]] = {}

    def add(self, name: str, data: bytes) -> None:
        """Write one file durably and note its size and hash."""
        faultpoint(f"checkpoint.{name}", self.step)
        self.files[name] = {"bytes": len(data), "sha256": write_durably(self.folder / name, data)}

    def seal(self, facts: dict[str, Any]) -> None:
        """Write the manifest, last of all files."""
        faultpoint(f"checkpoint.{MANIFEST}", self.step)
        manifest = {"format": FORMAT, **facts, "files": self.files}
        manifest["manifest_sha256"] = _hash_of(manifest)
        text = json.dumps(manifest, indent=1, allow_nan=False)
        write_durably(self.folder / MANIFEST, text.encode())


@contextmanager
def staged(run_dir: Path, step: int) -> Iterator[Staging]:
    """Stage a checkpoint and commit it by one rename when the block ends without an error.

    Raises: OSError if it cannot be written; the staging folder is then removed and nothing has changed.
    """
    folder = run_dir / f".tmp-{step:08d}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        staging = Staging(folder, step)
        yield staging
        sync_folder(folder)
        faultpoint("checkpoint.before_rename", step)
        os.rename(folder, run_dir / folder_name(step))  # the commit; fails if the step is there
        faultpoint("checkpoint.after_rename", step)
        sync_folder(run_dir)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _hash_of(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest after checking its own hash and the names in it.

    Raises: CheckpointError naming the file and what is wrong.
    """
    path = folder / MANIFEST
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{path}: a link or over {MAX_MANIFEST_BYTES} bytes; not a manifest of gpt2lab"
            )
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(manifest, dict) or not set(manifest) >= _REQUIRED:
        raise CheckpointError(f"{path}: not a manifest of gpt2lab")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r}, this version reads {FORMAT!r}"
        )
    if manifest["manifest_sha256"] != _hash_of(manifest):
        raise CheckpointError(f"{path}: damaged (its own hash does not match)")
    _check_types(path, manifest)
    if folder.name.startswith("step_") and folder.name != folder_name(manifest["step"]):
        raise CheckpointError(
            f"{folder}: holds step {manifest['step']}; a copied or renamed folder"
        )
    for name in manifest["files"]:
        if not name or name != os.path.basename(name) or name.startswith(".") or "\0" in name:
            raise CheckpointError(f"{path}: file name {name!r} is not a plain name")
    return manifest


def _check_types(path: Path, manifest: dict[str, Any]) -> None:
    """Reject a manifest whose hash holds but whose values have the wrong type: a hash does not prove intent."""
    files = manifest["files"]
    sound = (
        all(type(manifest[name]) is int and manifest[name] >= 0 for name in ("step", "tokens"))
        and isinstance(manifest["created"], (int, float))
        and isinstance(manifest["kind"], str)
        and isinstance(manifest["config"], dict)
        and isinstance(files, dict)
        and all(
            isinstance(file, dict)
            and type(file.get("bytes")) is int
            and isinstance(file.get("sha256"), str)
            for file in files.values()
        )
    )
    if not sound:
        raise CheckpointError(f"{path}: values of the wrong type; not a manifest of gpt2lab")


def verify(folder: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint against its manifest and return the manifest.

    Raises: CheckpointError naming the damaged file.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        try:
            if path.is_symlink():
                raise CheckpointError(f"{path}: a link, not a file")
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"{path}: damaged ({size} bytes, written as {expected['bytes']})"
                )
            found = sha256_of(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged (sha256 does not match its manifest)")
    return manifest
