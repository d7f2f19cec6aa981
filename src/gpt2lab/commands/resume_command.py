"""Print the command that continues a run or a checkpoint, after checking that it will.

python scripts/resume_command.py gpt2-124m
python scripts/resume_command.py gpt2-124m --num_gpus 8 --output slurm
python scripts/resume_command.py checkpoints/gpt2-124m/step_00005000 --max_lr 3e-4 --allow_change max_lr
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from gpt2lab import fmt
from gpt2lab.config.command_line import argument, option, run_tyro
from gpt2lab.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

_SCRIPT = """#!/usr/bin/env bash
set -euo pipefail
cd {folder}
exec {command}
"""

_SLURM = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:{world}
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
# Slurm signals the batch shell two minutes before the end; the trainer saves and exits with 0.
set -euo pipefail
cd {folder}
{command} &
trap 'kill -TERM $!' TERM
wait $! || wait $!
"""


@dataclass(frozen=True)
class Continuation:
    """How a run goes on: what the trainer would do, and the command line that makes it do so."""

    start: "Start"
    world: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class ResumeCommand:
    """Print the command that continues a run or a checkpoint; flags of the trainer are passed on."""

    target: Positional[str] = argument("run, or folder of a checkpoint")
    num_gpus: int | None = option(None, "world size; default as before")
    output: Literal["command", "script", "slurm"] = option("command", "what to print")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Print the command, and what it would change on stderr."""
    trainer_flags: list[str] = []
    flags = run_tyro(ResumeCommand, argv, passed_on=trainer_flags)
    if flags.num_gpus is not None and flags.num_gpus < 1:
        raise ConfigError(f"num_gpus {flags.num_gpus} must be at least 1")
    found = plan_continuation(
        flags.target,
        num_gpus=flags.num_gpus,
        argv=trainer_flags,
        checkpoint_dir=flags.checkpoint_dir,
    )
    for name, (before, now) in found.start.changes.items():
        print(f"changed: {name} {before} -> {now}", file=sys.stderr)
    if found.start.is_complete:
        hint = "to train on, add --max_steps N --allow_change max_steps"
        print(f"note: all {found.start.plan.max_steps} steps are done; {hint}", file=sys.stderr)
    print(write(found, output=flags.output))
    return 0


def plan_continuation(
    target: str, *, num_gpus: int | None, argv: list[str], checkpoint_dir: Path | None = None
) -> Continuation:
    """Return the command that continues a run, or one of its checkpoints, with `argv` as changed settings.

    Whatever the trainer would reject is rejected here. Nothing is written.

    Raises: GPT2LabError.
    """
    from gpt2lab import paths
    from gpt2lab.checkpoint import catalog
    from gpt2lab.commands.train import recipe_named
    from gpt2lab.config.command_line import parse
    from gpt2lab.runs import history
    from gpt2lab.runs.summary import program_of
    from gpt2lab.training.resolve import resolve

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
    name: Literal["pretrain", "finetune"] = "finetune" if program.stem == "finetune" else "pretrain"
    command = parse([*flags, *argv], name)
    start = resolve(command, recipe_named(name), world_size=world, set_aside=False)
    launcher = [paths.program("python")]
    if world > 1:
        launcher = [paths.program("torchrun"), "--standalone", f"--nproc_per_node={world}"]
    return Continuation(start, world, (*launcher, str(program), *flags, *argv))


def write(continuation: Continuation, *, output: str) -> str:
    """Write it as a command line, a shell script or a Slurm job.

    Names and settings appear only as quoted words of the command: in a comment, a newline in a name would start a
    command.
    """
    command = fmt.command_line(continuation.words)
    if output == "command":
        return command
    layout = _SLURM if output == "slurm" else _SCRIPT
    return layout.format(
        # Slurm reads no quotes.
        name=re.sub(r"[^A-Za-z0-9._-]", "_", continuation.start.run_dir.name),
        folder=fmt.word_of_bash(str(Path.cwd())),  # where what was typed means what it means here
        world=continuation.world,
        command=command,
    ).rstrip("\n")
