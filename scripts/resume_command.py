"""Print the command that continues a run or a checkpoint, after checking that it will."""

import sys

from _bootstrap import run
from gpt2lab.commands.resume_command import main

if __name__ == "__main__":
    sys.exit(run(main))
