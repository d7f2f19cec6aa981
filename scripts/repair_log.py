"""Remove the damaged lines of a run's metrics.jsonl, and make its index again."""

import sys

from _bootstrap import run
from gpt2lab.commands.repair_log import main

if __name__ == "__main__":
    sys.exit(run(main))
