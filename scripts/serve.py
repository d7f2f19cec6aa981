"""Serve a model on this machine: OpenAI's completion API, and a page to try it in the browser."""

import sys

from _bootstrap import run
from gpt2lab.commands.serve import main

if __name__ == "__main__":
    sys.exit(run(main))
