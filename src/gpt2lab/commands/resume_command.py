"""Print the command that continues a run or a checkpoint, after checking that it will.

python scripts/resume_command.py gpt2-124m
python scripts/resume_command.py gpt2-124m --num_gpus 8 --output slurm
python scripts/resume_command.py checkpoints/gpt2-124m/step_00005000 --max_lr 3e-4 --allow_change max_lr
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from gpt2lab.config.command_line import option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class ResumeCommand:
    """Print the command that continues a run or a checkpoint; flags of the trainer are passed on."""

    target: Positional[str] = field(metadata={"help": "run, or folder of a checkpoint"})
    num_gpus: int | None = option(None, "processes; default as many as before")
    output: Literal["command", "script", "slurm"] = option("command", "what to print")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Print the command, and what it would change on stderr."""
    trainer_flags: list[str] = []
    flags = run_tyro(ResumeCommand, argv, passed_on=trainer_flags)
    from gpt2lab import paths
    from gpt2lab.commands import resume_lines

    runs = flags.checkpoint_dir
    if flags.num_gpus is not None and flags.num_gpus < 1:
        raise ConfigError(f"num_gpus {flags.num_gpus} must be at least 1")
    found = resume_lines.plan_continuation(
        flags.target,
        num_gpus=flags.num_gpus,
        argv=trainer_flags,
        checkpoint_dir=paths.from_working_directory(runs) if runs else None,
    )
    for name, (before, now) in found.changes.items():
        print(f"changed: {name} {before} -> {now}", file=sys.stderr)
    if found.step == found.last_step:
        hint = "to train on, add --max_steps N --allow_change max_steps"
        print(f"note: all {found.step} steps are done; {hint}", file=sys.stderr)
    print(resume_lines.write(found, output=flags.output))
    return 0
