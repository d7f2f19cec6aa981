"""Compare settings of the trainer at equal tokens and seeds, and write a table with errors."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("ablate"))
