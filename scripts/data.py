"""Look after folders of token shards."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("data"))
