"""The command that continues a checkpoint, after the trainer's own checks of it. No torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.checkpoint import catalog
from gpt2lab.config.command_line import parse
from gpt2lab.config.schema import Recipe
from gpt2lab.errors import CheckpointError
from gpt2lab.runs import history
from gpt2lab.runs.summary import program_of
from gpt2lab.training.start import decide

_SCRIPT = """#!/usr/bin/env bash
# Continues {run}; changed settings: {changes}.
set -euo pipefail
cd {folder}
exec {command}
"""

_SLURM = """#!/usr/bin/env bash
#SBATCH --job-name={run}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:{world}
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
# Continues {run}; changed settings: {changes}.
# Slurm signals the batch shell two minutes before the end; the trainer saves and exits with 0.
set -euo pipefail
cd {folder}
{command} &
trap 'kill -TERM $!' TERM
wait $! || wait $!
"""


@dataclass(frozen=True)
class Continuation:
    """How a run goes on."""

    run_dir: Path
    step: int
    last_step: int
    world: int
    words: tuple[str, ...]  # the command line
    changes: dict[str, list[Any]]


def plan_continuation(
    target: str, *, num_gpus: int | None, argv: list[str], checkpoint_dir: Path | None = None
) -> Continuation:
    """Return the command that continues a run, or one of its checkpoints, with `argv` as changed settings.

    All that the trainer would refuse is refused here, and nothing is written.

    Raises: GPT2LabError.
    """
    folder = history.find_run(target, checkpoint_dir=checkpoint_dir)
    chosen, run_dir = "latest", folder
    if folder.name.startswith("step_") and (folder / "manifest.json").exists():
        chosen, run_dir = str(catalog.open_checkpoint(folder).step), folder.parent
    checkpoint, _ = catalog.newest_valid(run_dir, set_aside=False)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir}: no valid checkpoint to continue from")
    world = num_gpus or checkpoint.manifest["environment"]["world_size"]
    flags = ["--resume", chosen, "--run_name", run_dir.name]
    if run_dir.parent != paths.REPOSITORY / "checkpoints":
        flags += ["--checkpoint_dir", str(run_dir.parent)]
    program = program_of(run_dir)
    recipe: Recipe = "finetune" if program.stem == "finetune" else "pretrain"
    start = decide(parse([*flags, *argv], recipe), world_size=world, set_aside=False)
    assert start.checkpoint is not None
    launcher = [paths.program("python")]
    if world > 1:
        launcher = [paths.program("torchrun"), "--standalone", f"--nproc_per_node={world}"]
    return Continuation(
        run_dir=run_dir,
        step=start.checkpoint.step,
        last_step=start.plan.max_steps,
        world=world,
        words=(*launcher, str(program), *flags, *argv),
        changes=start.changes,
    )


def write(continuation: Continuation, *, output: str) -> str:
    """Write it as a command line, a shell script or a Slurm job."""
    command = shlex.join(continuation.words)
    if output == "command":
        return command
    changes = ", ".join(f"{n} {old} -> {new}" for n, (old, new) in continuation.changes.items())
    layout = _SLURM if output == "slurm" else _SCRIPT
    return layout.format(
        run=continuation.run_dir.name,
        changes=changes or "none",
        folder=shlex.quote(str(Path.cwd())),  # where what was typed means what it means here
        world=continuation.world,
        command=command,
    ).rstrip("\n")
