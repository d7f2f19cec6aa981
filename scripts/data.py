"""Look after folders of token shards."""

import sys

from _bootstrap import run
from gpt2lab.commands.data import main

if __name__ == "__main__":
    sys.exit(run(main))
