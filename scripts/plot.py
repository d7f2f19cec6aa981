"""Draw the curves of one run, or of several over each other, into a PNG."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.plot import main

if __name__ == "__main__":
    sys.exit(run(main))
