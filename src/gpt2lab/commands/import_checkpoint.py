"""`--import_checkpoint FILE.pt`: a foreign file becomes the first checkpoint of a run, which `--resume` continues."""

from __future__ import annotations

from pathlib import Path

from gpt2lab import paths
from gpt2lab.config.request import RunRequest
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.interop.import_checkpoint import import_planned, plan_import, settings_table
from gpt2lab.runs import summary
from gpt2lab.training.evaluator import validation_line


def import_checkpoint(request: RunRequest, path: Path, *, trust: bool = False) -> int:
    """Convert the file, evaluate it, commit it, and print what was taken from it and how to continue.

    Raises: CheckpointError for the file, ConfigError and DataError for the run it begins, with all that is wrong in one
    line; nothing is written then.
    """
    runtime = Runtime()
    path = paths.from_working_directory(path)
    planned = plan_import(request, path, runtime, trust=trust)
    start, foreign = planned.start, planned.foreign
    print(f"evaluating {path.name} on {start.config.eval.val_tokens:,} tokens", flush=True)
    folder, loss, seconds = import_planned(planned, runtime)
    for warning in start.warnings:
        print(f"note: {warning}")
    if rows := settings_table(planned):
        theirs, ours = (max(len(row[column]) for row in rows) for column in (0, 1))
        for row in rows:
            print(f"{row[0].ljust(theirs)}  {row[1].ljust(ours)}  {row[2]}".rstrip())
    moments = "as in the file" if foreign.moments else "none in the file: its moments begin at zero"
    before = foreign.best_val_loss
    print(
        f"imported {path.name}: {start.plan.parameters:,} parameters, step {foreign.step} of {start.plan.max_steps}\n"
        f"{validation_line(loss, seconds)}"
        f"{'' if before is None else f' | best in the file {before:.4f}'}\n"
        f"optimizer {moments}\n"
        f"data begins at sample 0: the file does not record the windows that it was trained on\n"
        f"saved as {paths.display_path(folder)}; continue with: "
        f"{summary.command_to_resume(start.run_dir, world_size=1)}"
    )
    return 0
