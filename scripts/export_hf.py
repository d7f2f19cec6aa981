"""Write a run's weights as a Hugging Face folder, checked against transformers before it appears."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("export"))
