"""Make a run's TensorBoard files from its metrics.jsonl, also for a run without --use_tensorboard."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.rebuild_tensorboard import main

if __name__ == "__main__":
    sys.exit(run(main))
