"""Talk to a fine-tuned run, checkpoint or export, line by line; also from a pipe."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("chat"))
