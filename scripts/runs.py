"""Delete, archive or sync runs."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("runs"))
