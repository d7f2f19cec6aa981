"""`gpt2lab VERB`, also as `python -m gpt2lab VERB` and `torchrun ... -m gpt2lab VERB`."""

import sys

from gpt2lab.commands.entry import run
from gpt2lab.commands.verbs import main


def program() -> int:
    """Run the verb on the command line and return its exit code."""
    return run(main)


if __name__ == "__main__":
    sys.exit(program())
