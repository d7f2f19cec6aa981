"""Write a run's report: one HTML page with everything about it, for any browser, without a network."""

import sys

from _bootstrap import run
from gpt2lab.commands.report import main

if __name__ == "__main__":
    sys.exit(run(main))
