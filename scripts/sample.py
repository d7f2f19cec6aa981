"""Continue prompts with a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2."""

import sys

from _bootstrap import run
from gpt2lab.commands.sample import main

if __name__ == "__main__":
    sys.exit(run(main))
