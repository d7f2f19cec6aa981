"""Hash a file, and write files that survive a crash: flushed to the disk before they get their name."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hex; the file is read in blocks.

    Raises: OSError.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_durably(path: Path, data: bytes) -> str:
    """Write a new file, flush it to the disk, and return its sha256 in hex.

    Raises: OSError (disk full, read-only), FileExistsError if the file is there already.
    """
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: str | bytes) -> None:
    """Replace a small file in one step: readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        write_durably(temporary, content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a write names none
        raise
    sync_folder(path.parent)
