"""Continue prompts with a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("sample"))
