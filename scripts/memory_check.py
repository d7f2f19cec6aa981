"""Compare what a run needs at its peak, by category, with the memory that is free here. Flags as estimate_time.py."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("memory-check"))
