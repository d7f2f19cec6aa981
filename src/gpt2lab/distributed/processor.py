"""The processor's name, bf16 and cores, and GPUs that torch cannot use, without torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Most processors multiply fp16 by way of fp32.
FP16_ON_CPU = (
    "dtype fp16: mostly slow on a CPU, and there only to test fp16; train with --dtype auto"
)
# The oldest driver for a major version of CUDA: NVIDIA's "CUDA Compatibility", minor version compatibility.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


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


def smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; nothing without it, or without an answer in 20 seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        # The first call after a boot loads the driver, which takes seconds for each card.
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def build_of_torch() -> tuple[str, str | None]:
    """Return torch's version and the CUDA version that it was built for, from its version.py; no import."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "", None
    text = (Path(torch.origin).parent / "version.py").read_text()
    version = re.search(r"^__version__ = '([^'+]+)", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.M)
    return version[1] if version else "", cuda[1] if cuda else None


def unseen_gpus() -> str | None:
    """Return why torch cannot use the GPUs that nvidia-smi lists, and the fix; None if it can, or there are none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return None  # hidden on purpose
    found = smi("--query-gpu=name,driver_version", "--format=csv,noheader").partition("\n")[0]
    name, _, driver = found.rpartition(", ")
    digits = re.match(r"\d+", driver)
    version, cuda = build_of_torch()
    if not name or digits is None or not version:
        return None
    newest, modern = int(digits[0]), _OLDEST_DRIVER[13]
    oldest = 0 if cuda is None else _OLDEST_DRIVER.get(int(cuda.partition(".")[0]), modern)
    if cuda is not None and newest >= oldest:
        return None
    wheel = f"pip install torch=={version} --index-url https://download.pytorch.org/whl"
    fixes = ["train on the processor with --device cpu"]
    if newest >= _OLDEST_DRIVER[12]:
        fixes.insert(0, f"{wheel}/{'cu130' if newest >= modern else 'cu126'}")
    if newest < modern:
        fixes.insert(0, f"update the driver to {modern} or newer")
    needs = "without CUDA" if cuda is None else f"for CUDA {cuda}, which needs driver {oldest}"
    return (
        f"nvidia-smi lists {name} with driver {driver}, but torch {version} is built {needs}: "
        f"{', or '.join(fixes)}"
    )
