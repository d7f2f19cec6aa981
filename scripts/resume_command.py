"""Print the command that continues a run or a checkpoint, after checking that it will."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("resume-command"))
