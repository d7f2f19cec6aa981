"""Tokenise text into the shards that the trainer reads."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.prepare_data import main

if __name__ == "__main__":
    sys.exit(run(main))
