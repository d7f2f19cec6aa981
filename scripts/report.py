"""Write a run's report: one HTML page with everything about it, for any browser, without a network."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("report"))
