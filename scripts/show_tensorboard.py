"""Show the runs in TensorBoard: start it in the background for this machine only, or stop the one that was started."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("tensorboard"))
