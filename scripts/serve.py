"""Serve a model on this machine: OpenAI's completion API, and a page to try it in the browser."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("serve"))
