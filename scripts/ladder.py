"""Train a ladder of small models, fit a scaling law to it, and predict a larger one before it is trained."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("ladder"))
