"""Take steps of a run again, as they were or with one thing changed."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("replay"))
