"""Tokenize text into the shards that the trainer reads."""

import sys

from _bootstrap import run
from gpt2lab.commands.prepare_data import main

if __name__ == "__main__":
    sys.exit(run(main))
