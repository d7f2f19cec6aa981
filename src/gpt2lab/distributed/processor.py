"""The processor's name, whether it has bf16, and how many cores this process may use, from /proc/cpuinfo. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the processor's model; platform.processor() is empty or an architecture on most systems."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def has_bf16() -> bool:
    """Tell whether the processor multiplies bf16 in hardware: avx512_bf16, amx_bf16 or Arm bf16."""
    words = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not Linux
