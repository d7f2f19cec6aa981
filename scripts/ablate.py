"""Compare settings of the trainer at equal tokens and seeds, and write a table with errors."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.ablate import main
from gpt2lab.commands.entry import run

if __name__ == "__main__":
    sys.exit(run(main))
