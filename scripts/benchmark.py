"""Measure this machine, side by side with other ways of doing the same. One verb per measurement."""

import sys

import _bootstrap  # noqa: F401
from benchmarks.command import main
from gpt2lab.commands.entry import run

if __name__ == "__main__":
    sys.exit(run(main))
