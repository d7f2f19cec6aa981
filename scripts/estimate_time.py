"""Predict a run before it starts: time, memory, cost, loss; or tell how long the newest run still takes."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("estimate"))
