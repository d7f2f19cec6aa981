"""Show all runs: state, step, loss, speed, time left, last checkpoint."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.status import main

if __name__ == "__main__":
    sys.exit(run(main))
