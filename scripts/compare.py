"""Tell whether two evaluations differ by more than noise, item by item and window by window."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("compare"))
