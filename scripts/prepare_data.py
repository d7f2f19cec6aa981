"""Tokenize text into the shards that the trainer reads."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("prepare"))
