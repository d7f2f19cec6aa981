"""Predict a run before it starts: time, memory, cost, loss; or tell how long the newest run still takes."""

import sys

from _bootstrap import run
from gpt2lab.commands.estimate_time import main

if __name__ == "__main__":
    sys.exit(run(main))
