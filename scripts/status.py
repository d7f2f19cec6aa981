"""Show all runs: state, step, loss, speed, time left, last checkpoint."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("status"))
