"""Show the devices of this machine: GPUs, driver, capability, bf16, free memory, topology; the processor."""

import sys

from _bootstrap import run

if __name__ == "__main__":
    sys.exit(run("gpu-info"))
