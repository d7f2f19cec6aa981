"""Make a run's TensorBoard files from its metrics.jsonl, also for a run without --use_tensorboard.

gpt2lab runs rebuild-tensorboard gpt2-124m
gpt2lab runs rebuild-tensorboard checkpoints/gpt2-124m
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2lab import paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option


@dataclass(frozen=True)
class Rebuild:
    """Make a run's TensorBoard files from its metrics.jsonl."""

    run: str = argument("name in checkpoints/, or folder")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Rebuild and say where."""
    flags = parse_flags(Rebuild, argv, name="gpt2lab runs rebuild-tensorboard")
    from gpt2lab.runs import history

    found = history.find_run(flags.run, checkpoint_dir=flags.checkpoint_dir)
    from gpt2lab.tracking.tensorboard import rebuild_tensorboard  # torch

    folder, count = rebuild_tensorboard(found)
    print(f"{paths.display_path(folder)}: {count:,} events")
    return 0
