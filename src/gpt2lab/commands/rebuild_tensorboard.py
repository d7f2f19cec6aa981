"""Make a run's TensorBoard files from its metrics.jsonl, also for a run without --use_tensorboard.

gpt2lab runs rebuild-tensorboard latest
gpt2lab runs rebuild-tensorboard checkpoints/gpt2-124m
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2lab import paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import RUN, argument, option


@dataclass(frozen=True)
class Rebuild:
    """Make a run's TensorBoard files from its metrics.jsonl."""

    run: str = argument(RUN)
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Rebuild and say where."""
    flags = parse_flags(Rebuild, argv, name="gpt2lab runs rebuild-tensorboard")
    from gpt2lab.runs.target import find_run

    found = find_run(flags.run, flags.checkpoint_dir)
    from gpt2lab.tracking.tensorboard import rebuild_tensorboard  # torch

    folder, count = rebuild_tensorboard(found)
    print(f"{paths.display_path(folder)}: {count:,} events")
    return 0
