"""Write a run's weights as a Hugging Face folder, checked against transformers before it appears."""

import sys

from _bootstrap import run
from gpt2lab.commands.export_hf import main

if __name__ == "__main__":
    sys.exit(run(main))
