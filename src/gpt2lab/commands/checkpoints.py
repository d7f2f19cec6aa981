"""`--list_checkpoints`: every checkpoint of the runs in a folder, read from manifests. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import verify
from gpt2lab.errors import CheckpointError
from gpt2lab.runs import history
from gpt2lab.runs.overview import describe_mirror, lineage
from gpt2lab.runs.summary import checkpoint_table
from gpt2lab.runs.target import find_run


def print_checkpoints(
    checkpoint_dir: Path, *, run_name: str | None, as_json: bool, verify_bytes: bool = False
) -> int:
    """Print the checkpoints of every run, or of one, as tables or as one JSON object; return the exit code.

    `verify_bytes` reads every byte: the exit code is then 1 if something is damaged.
    """
    runs = catalog.run_folders(checkpoint_dir)
    if run_name is not None:
        runs = [find_run(run_name, checkpoint_dir)]
        checkpoint_dir = runs[0].parent
    listed = [(run, *catalog.list_checkpoints(run)) for run in runs]
    listed = [entry for entry in listed if entry[1] or entry[2]]
    for _, infos, damaged in listed if verify_bytes else ():
        for info in list(infos):
            try:
                verify(info.path)
            except CheckpointError as error:
                infos.remove(info)
                damaged.append(error)
    code = int(verify_bytes and any(damaged for _, _, damaged in listed))
    if as_json:
        found = [_listed_as_json(*entry) for entry in listed]
        print(json.dumps({"checkpoint_dir": str(checkpoint_dir), "runs": found}))
        return code
    if not listed:
        print(f"no checkpoints in {paths.display_path(runs[0] if run_name else checkpoint_dir)}")
    for run, infos, damaged in listed:
        total = fmt.num_bytes(sum(info.num_bytes for info in infos))
        count = fmt.number_of(len(infos), "checkpoint")
        print(f"{paths.display_path(run)}: {count}, {total}")
        print(checkpoint_table(infos))
        if line := describe_mirror(history.read_json(run / "status.json") or {}):
            print(f"  {line}")
        for problem in damaged:
            print(f"  damaged, not counted: {problem}")
        if verify_bytes:
            print(f"  every byte of {count} read, hashes match")
        print()
    if tree := lineage(checkpoint_dir, of=run_name):
        print("\n".join(["branches", *tree]))
    return code


def _listed_as_json(
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
    branch = (history.read_json(run / "run.json") or {}).get("branch_from")
    return {
        "run_name": run.name,
        "branch_from": branch,
        "checkpoints": rows,
        "damaged": [str(error) for error in damaged],
    }
