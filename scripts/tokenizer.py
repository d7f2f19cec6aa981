"""Learn a tokenizer from text, and show one."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("tokenizer"))
