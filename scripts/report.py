"""Write a run's report: one HTML page with everything about it, for any browser, without a network."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.report import main

if __name__ == "__main__":
    sys.exit(run(main))
