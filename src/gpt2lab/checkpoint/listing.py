"""`--list_checkpoints`: what a folder of runs holds. No torch, nothing is created or locked."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint import manifest as manifests
from gpt2lab.errors import CheckpointError
from gpt2lab.files import JsonFile
from gpt2lab.mirror.storage import describe_status


def print_checkpoints(
    checkpoint_dir: Path, *, run_name: str | None, as_json: bool, verify: bool = False
) -> int:
    """Print every run's checkpoints as tables, or all as one JSON object; return the exit code.

    `verify` reads every byte: then 1 tells that something is damaged.
    """
    runs = [checkpoint_dir / run_name] if run_name else catalog.run_folders(checkpoint_dir)
    listed = [(run, *catalog.list_checkpoints(run)) for run in runs]
    listed = [entry for entry in listed if entry[1] or entry[2]]
    for _, infos, damaged in listed if verify else ():
        for info in list(infos):
            try:
                manifests.verify(info.path)
            except CheckpointError as error:
                infos.remove(info)
                damaged.append(error)
    code = int(verify and any(damaged for _, _, damaged in listed))
    if as_json:
        found = [_as_json(*entry) for entry in listed]
        print(json.dumps({"checkpoint_dir": str(checkpoint_dir), "runs": found}))
        return code
    if not listed:
        print(f"no checkpoints in {paths.display_path(runs[0] if run_name else checkpoint_dir)}")
    for run, infos, damaged in listed:
        total = fmt.num_bytes(sum(info.num_bytes for info in infos))
        print(f"{paths.display_path(run)}: {fmt.number_of(len(infos), 'checkpoint')}, {total}")
        print(checkpoint_table(infos))
        with contextlib.suppress(CheckpointError):  # a run may have no status yet
            status = JsonFile(run / "status.json", CheckpointError).read()
            if line := describe_status(status):
                print(f"  {line}")
        for problem in damaged:
            print(f"  damaged, not counted: {problem}")
        if verify:
            count = fmt.number_of(len(infos), "checkpoint")
            print(f"  every byte of {count} read, hashes as written")
        print()
    return code


def checkpoint_table(infos: list[catalog.CheckpointInfo]) -> str:
    """Write checkpoints as a table, oldest first."""
    rows = [
        (
            f"{info.step:,}",
            ", ".join([info.kind, *(x for x in info.labels if not x.startswith(info.kind))]),
            fmt.number(info.val_loss),
            f"{info.tokens:,}",
            fmt.num_bytes(info.num_bytes),
            fmt.duration(max(0.0, time.time() - info.created)),
        )
        for info in infos
    ]
    return fmt.table(("step", "kind", "val loss", "tokens", "size", "age"), rows)


def _as_json(
    run: Path, infos: list[catalog.CheckpointInfo], damaged: list[CheckpointError]
) -> dict[str, object]:
    rows = [
        {
            "path": str(info.path),
            "step": info.step,
            "kind": info.kind,
            "labels": list(info.labels),
            "val_loss": info.val_loss,
            "tokens": info.tokens,
            "bytes": info.num_bytes,
            "created": info.created,
        }
        for info in infos
    ]
    return {"run_name": run.name, "checkpoints": rows, "damaged": [str(error) for error in damaged]}
