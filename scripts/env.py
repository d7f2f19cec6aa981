"""Print the versions and the hardware, and a run's facts, to paste into an issue."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("env"))
