"""Say which samples led to a spike, and what the step is without them."""

import sys

from _bootstrap import run
from gpt2lab.commands.why_spike import main

if __name__ == "__main__":
    sys.exit(run(main))
