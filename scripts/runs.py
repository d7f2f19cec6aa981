"""Delete, archive or sync runs."""

import sys

from _bootstrap import run
from gpt2lab.commands.runs import main

if __name__ == "__main__":
    sys.exit(run(main))
