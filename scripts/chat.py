"""Talk to a fine-tuned run, checkpoint or export, line by line; also from a pipe."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.chat import main
from gpt2lab.commands.entry import run

if __name__ == "__main__":
    sys.exit(run(main))
