"""Show the devices of this machine: GPUs, driver, capability, bf16, free memory, topology; the processor.

gpt2lab gpu-info
gpt2lab gpu-info --json
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass

from gpt2lab import fmt
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import option
from gpt2lab.distributed import processor
from gpt2lab.planner import hardware, machine
from gpt2lab.planner.machine import GpuState
from gpt2lab.planner.reports import GIB

_NOT_THROTTLED = (None, "0x0000000000000000", "0x0000000000000001")  # no event, or idle


@dataclass(frozen=True)
class GpuInfo:
    """Show the GPUs and the processor of this machine."""

    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Print the GPUs with the peak used for MFU, and the processor; or that there is no GPU."""
    flags = parse_flags(GpuInfo, argv)
    found = machine.look().gpus
    available, cores, load = machine.available_memory(), processor.cores(), machine.load_average()
    if flags.json:
        document = {
            "gpus": [_as_json(gpu) for gpu in found],
            "topology": _topology(found) or None,
            "cpu": {
                "name": processor.cpu_name(),
                "cores": cores,
                "bf16": processor.has_bf16(),
                "memory_available": available,
                "load_average": load,
            },
        }
        print(json.dumps(document))
        return 0
    if found:
        _print_gpus(found)
    else:
        has_tool = shutil.which("nvidia-smi")
        why = "nvidia-smi names none" if has_tool else "nvidia-smi is not on the PATH"
        if has_tool and "CUDA_VISIBLE_DEVICES" in os.environ:
            why += f" that CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} leaves visible"
        print(f"no GPU: {why}; training would use the processor")
    memory = "unknown" if available is None else f"{available / GIB:.1f} GiB free"
    bf16 = "bf16 in hardware" if processor.has_bf16() else "no bf16 in hardware: fp32"
    print(
        f"CPU  {processor.cpu_name()}, {cores} cores, {bf16}, memory {memory}, load average {load:.2f}"
    )
    return 0


def _print_gpus(found: tuple[GpuState, ...]) -> None:
    header = ["GPU", "name", "capability", "bf16", "free GiB", "of", "busy", "clock"]
    print(fmt.table([*header, "peak TFLOP/s"], [_cells(gpu) for gpu in found]))
    print(f"driver {found[0].driver}; peak = dense bf16 of hardware.json, used for MFU")
    for gpu in found:
        if gpu.throttle not in _NOT_THROTTLED:
            why = f"event reasons {gpu.throttle} (nvidia-smi -q -d PERFORMANCE)"
            print(f"GPU {gpu.index} is throttled: {why}")
    if text := _topology(found):
        print(text)


def _cells(gpu: GpuState) -> list[str]:
    peak = hardware.peak_flops(gpu.name)
    return [
        str(gpu.index),
        gpu.name,
        gpu.capability or "n/a",
        _bf16(gpu),
        *(
            "n/a" if size is None else f"{size / GIB:.1f}"
            for size in (gpu.memory_free, gpu.memory_total)
        ),
        "n/a" if gpu.utilization is None else f"{gpu.utilization:.0f} %",
        "n/a" if gpu.clock is None else f"{gpu.clock} MHz",
        "n/a" if peak is None else f"{peak / 1e12:,.0f}",
    ]


def _as_json(gpu: GpuState) -> dict[str, object]:
    names = ("index", "name", "memory_total", "memory_free", "utilization", "driver", "capability")
    seen = {name: getattr(gpu, name) for name in names}
    return seen | {"bf16": _bf16(gpu), "peak_flops": hardware.peak_flops(gpu.name)}


def _bf16(gpu: GpuState) -> str:
    if gpu.capability is None:
        return "n/a"
    return "yes" if float(gpu.capability) >= 8.0 else "no"


def _topology(found: tuple[GpuState, ...]) -> str:
    return machine.smi("topo", "-m").rstrip() if len(found) > 1 else ""
