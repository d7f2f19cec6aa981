"""Name the first step in which two runs differ, and what differs in it first."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("bisect"))
