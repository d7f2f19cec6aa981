"""Make a run's TensorBoard files from its metrics.jsonl, also for a run without --use_tensorboard."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("rebuild-tensorboard"))
