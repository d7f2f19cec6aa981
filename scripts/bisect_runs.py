"""Name the first step in which two runs differ, and what differs in it first."""

import sys

from _bootstrap import run
from gpt2lab.commands.bisect_runs import main

if __name__ == "__main__":
    sys.exit(run(main))
