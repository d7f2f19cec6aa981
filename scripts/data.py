"""Look after folders of token shards."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.data import main
from gpt2lab.commands.entry import run

if __name__ == "__main__":
    sys.exit(run(main))
