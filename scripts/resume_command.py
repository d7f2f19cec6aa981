"""Print the command that continues a run or a checkpoint, after checking that it will."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.resume_command import main

if __name__ == "__main__":
    sys.exit(run(main))
