"""Remove the damaged lines of a run's metrics.jsonl, and make its index again."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("repair-log"))
