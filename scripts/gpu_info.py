"""Show the devices of this machine: GPUs, driver, capability, bf16, free memory, topology; the processor."""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.commands.entry import run
from gpt2lab.commands.gpu_info import main

if __name__ == "__main__":
    sys.exit(run(main))
