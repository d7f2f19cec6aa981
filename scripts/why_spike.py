"""Say which samples led to a spike, and what the step is without them."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("why-spike"))
