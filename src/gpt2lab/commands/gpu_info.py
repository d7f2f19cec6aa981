"""Show the devices of this machine: GPUs, driver, capability, bf16, free memory, topology; the processor.

python scripts/gpu_info.py
"""

from dataclasses import dataclass

from gpt2lab.config.command_line import option, run_tyro


@dataclass(frozen=True)
class GpuInfo:
    """Show the devices of this machine; says so where there is no GPU."""

    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Print the devices."""
    flags = run_tyro(GpuInfo, argv)
    from gpt2lab.planner.gpu_report import print_devices

    return print_devices(as_json=flags.json)
