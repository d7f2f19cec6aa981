"""Learn a tokenizer from text, and show one."""

import sys

from _bootstrap import run
from gpt2lab.commands.tokenizer import main

if __name__ == "__main__":
    sys.exit(run(main))
