"""Continue prompts with a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.sample import main

if __name__ == "__main__":
    sys.exit(run(main))
