"""Runs of a few bytes, and their copies in a mirror."""

import json
import os
from pathlib import Path
from typing import Any

from gpt2lab.checkpoint import manifest
from gpt2lab.mirror.storage import Mirror

FACTS: dict[str, Any] = {"tokens": 1, "config": {}, "data_fingerprint": "f"}
FACTS["environment"] = {"world_size": 1}
FIRST_LINE = '{"event": "begin", "time": 1.0, "attempt": 1, "step": 0}\n'
WAIT = 60.0  # seconds until a test that hangs fails


def new_run(folder: Path, first_line: str = FIRST_LINE) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(first_line)
    return folder


def commit(
    run_dir: Path,
    step: int,
    *,
    kind: str = "rolling",
    attempt: int = 1,
    created: float | None = None,
) -> Path:
    """Commit a checkpoint of random bytes, some of them above one block of a copy."""
    weights = os.urandom(5 * 2**20 if step == 1 else 1000)
    facts = FACTS | {"run": run_dir.name, "step": step, "kind": kind, "attempt": attempt}
    facts["created"] = float(step) if created is None else created
    files = {"model.safetensors": [weights], "state.json": [b"{}"]}
    manifest.commit(run_dir, manifest.Draft(step, files, facts))
    with open(run_dir / "metrics.jsonl", "a") as log:
        log.write(json.dumps({"event": "checkpoint", "step": step}) + "\n")
    return run_dir / manifest.folder_name(step)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def steps(mirror: Mirror) -> list[int]:
    return [copy.step for copy in mirror.list_copies()[0]]


def copy_to(mirror: Mirror, *folders: Path) -> None:
    for folder in folders:
        mirror.upload(folder, manifest.read_manifest(folder))
