"""Every checkpoint of the runs in a folder, read from manifests. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import verify
from gpt2lab.commands.parser import AmongRuns, WithJson
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import CheckpointError
from gpt2lab.runs import history
from gpt2lab.runs.overview import describe_mirror, lineage
from gpt2lab.runs.summary import checkpoint_table
from gpt2lab.runs.target import find_run


@dataclass(frozen=True)
class List(WithJson, AmongRuns):
    """List the checkpoints of all runs, or of one; reads manifests only."""

    run: str | None = argument("run (name or folder); default all", default=None)
    verify: bool = option(
        False, "read every byte and compare its hash; exit code 1 if one is damaged"
    )

    def execute(self) -> int:
        """Print the checkpoints as tables or as one JSON object; return the exit code."""
        return self.show(self.runs_folder())

    def show(self, checkpoint_dir: Path) -> int:
        """Print those of a folder, which may be missing."""
        runs = catalog.run_folders(checkpoint_dir)
        if self.run is not None:
            runs = [find_run(self.run, checkpoint_dir)]
            checkpoint_dir = runs[0].parent
        listed = [(run, *catalog.list_checkpoints(run)) for run in runs]
        listed = [entry for entry in listed if entry[1] or entry[2]]
        for _, infos, damaged in listed if self.verify else ():
            for info in list(infos):
                try:
                    verify(info.path)
                except CheckpointError as error:
                    infos.remove(info)
                    damaged.append(error)
        code = int(self.verify and any(damaged for _, _, damaged in listed))
        if self.json:
            found = [_listed_as_json(*entry) for entry in listed]
            print(json.dumps({"checkpoint_dir": str(checkpoint_dir), "runs": found}))
            return code
        if not listed:
            print(
                f"no checkpoints in {paths.display_path(runs[0] if self.run else checkpoint_dir)}"
            )
        for run, infos, damaged in listed:
            total = fmt.num_bytes(sum(info.num_bytes for info in infos))
            count = fmt.number_of(len(infos), "checkpoint")
            print(f"{paths.display_path(run)}: {count}, {total}")
            print(checkpoint_table(infos))
            if line := describe_mirror(history.read_json(run / "status.json") or {}):
                print(f"  {line}")
            for problem in damaged:
                print(f"  damaged, not counted: {problem}")
            if self.verify:
                print(f"  every byte of {count} read, hashes match")
            print()
        if tree := lineage(checkpoint_dir, of=self.run and runs[0].name):
            print("\n".join(["branches", *tree]))
        return code


def _listed_as_json(
    run: Path, infos: list[catalog.CheckpointInfo], damaged: list[CheckpointError]
) -> dict[str, object]:
    names = ("step", "kind", "val_loss", "tokens", "created")
    rows = [
        {"path": str(info.path), **{name: getattr(info, name) for name in names}}
        | {"labels": list(info.labels), "bytes": info.num_bytes}
        for info in infos
    ]
    branch = (history.read_json(run / "run.json") or {}).get("branch_from")
    return {
        "run_name": run.name,
        "branch_from": branch,
        "checkpoints": rows,
        "damaged": [str(error) for error in damaged],
    }
