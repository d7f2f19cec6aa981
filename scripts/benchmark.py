"""Measure this machine, side by side with other ways of doing the same. One verb per measurement."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("benchmark"))
