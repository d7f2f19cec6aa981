"""Talk to a fine-tuned run, checkpoint or export, line by line; also from a pipe."""

import sys

from _bootstrap import run
from gpt2lab.commands.chat import main

if __name__ == "__main__":
    sys.exit(run(main))
