"""Draw the curves of one run, or of several over each other, into a PNG."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("plot"))
