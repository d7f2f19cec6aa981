"""Take steps of a run again, as they were or with one thing changed."""

import sys

from _bootstrap import run
from gpt2lab.commands.replay import main

if __name__ == "__main__":
    sys.exit(run(main))
