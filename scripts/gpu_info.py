"""Show the devices of this machine: GPUs, driver, capability, bf16, free memory, topology; the processor.

python scripts/gpu_info.py
"""

import sys
from dataclasses import dataclass

import _bootstrap  # noqa: F401
from gpt2lab.door import run
from gpt2lab.flags import option, run_tyro


@dataclass(frozen=True)
class GpuInfo:
    """Show the devices of this machine; says so where there is no GPU."""

    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Print the devices."""
    flags = run_tyro(GpuInfo, argv)
    from gpt2lab.planning.gpu_report import print_devices

    return print_devices(as_json=flags.json)


if __name__ == "__main__":
    sys.exit(run(main))
