"""Tell whether two evaluations differ by more than noise, item by item and window by window."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.compare import main
from gpt2lab.commands.entry import run

if __name__ == "__main__":
    sys.exit(run(main))
