"""What the work runs on: this machine as far as it can be seen without torch, or one that is only named."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt2lab.errors import ConfigError
from gpt2lab.planner.hardware import Gpu, Hardware, Link
from gpt2lab.planner.timing import Rates


@dataclass(frozen=True)
class Machine:
    """Processes of one kind, how fast each is, and what connects them."""

    title: str
    device: str  # as the driver or the processor names itself
    kind: Literal["cpu", "gpu"]
    gpu: Gpu | None  # None: a CPU, or a GPU that is not in hardware.json
    processes: int
    nodes: int
    link: Link | None  # the slowest that an all-reduce crosses
    memory_bytes: float | None  # what one process may use
    rates: Rates
    note: str | None = None  # why these rates

    @property
    def is_cpu(self) -> bool:
        """Tell whether it trains on its processor."""
        return self.kind == "cpu"


@dataclass(frozen=True)
class GpuState:
    """One GPU as nvidia-smi sees it now."""

    index: int
    name: str
    memory_total: float  # bytes
    memory_free: float
    utilization: float | None  # percent
    driver: str
    capability: str | None
    power: str | None
    clock: str | None
    throttle: str | None


_QUERY = (
    "index,name,memory.total,memory.free,utilization.gpu,driver_version,compute_cap,power.draw,"
    "clocks.sm,clocks_event_reasons.active"
)


def gpus() -> list[GpuState]:
    """Ask nvidia-smi; an empty list where there is no GPU, no driver or no answer in five seconds."""
    text = smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    states = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 10 or not cells[0].isdigit():
            continue
        number = [_number(cell) for cell in cells]
        states.append(
            GpuState(
                index=int(cells[0]),
                name=cells[1],
                memory_total=(number[2] or 0.0) * 2**20,
                memory_free=(number[3] or 0.0) * 2**20,
                utilization=number[4],
                driver=cells[5],
                capability=_known(cells[6]),
                power=_known(cells[7]),
                clock=_known(cells[8]),
                throttle=_known(cells[9]),
            )
        )
    return states


def smi(*arguments: str) -> str:
    """Return what nvidia-smi prints, or nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _known(cell: str) -> str | None:
    return None if cell in ("", "[N/A]", "N/A", "[Not Supported]") else cell


def cpu_name() -> str:
    """Return the processor's model; platform.processor() is empty or an architecture on most systems."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Return the cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def has_bf16() -> bool:
    """Tell whether the processor multiplies bf16 in hardware: avx512_bf16, amx_bf16 or Arm bf16."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def available_memory() -> float | None:
    """Return the bytes that can be used without swapping, None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return None


def load_average() -> float:
    """Return how many processes wanted a core in the last minute; 0 where unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def core_flops(seconds: float = 0.08) -> float:
    """Multiply fp32 matrices with numpy on one core for `seconds` of its time and return the best FLOP/s.

    By processor time and on one thread, so that others on the machine do not make it look slow.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    size, best = 512, 0.0
    left, right = np.ones((size, size), np.float32), np.ones((size, size), np.float32)
    out = np.empty_like(left)
    with threadpool_limits(1):
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            start = time.thread_time()
            np.matmul(left, right, out=out)
            best = max(best, 2 * size**3 / (time.thread_time() - start))
    return best


def named(
    gpu: Gpu, hardware: Hardware, *, gpus: int, nodes: int, interconnect: str | None, rates: Rates
) -> Machine:
    """Return a machine of `gpus` cards in all on `nodes` nodes that nobody has to own.

    Raises: ConfigError if a number is missing that it needs.
    """
    if gpus < 1 or nodes < 1:
        raise ConfigError(f"{gpus} GPUs on {nodes} nodes: both must be at least 1")
    if gpus % nodes:
        raise ConfigError(
            f"gpus {gpus} (in all) do not spread evenly over {nodes} nodes; "
            f"try --gpus {nodes * max(1, round(gpus / nodes))}"
        )
    link = None
    if nodes > 1:
        if interconnect is None:
            raise ConfigError(
                f"nodes {nodes}: say what connects them with --interconnect; one of {', '.join(hardware.links)}"
            )
        link = hardware.link(interconnect)
    elif gpus > 1:
        name = interconnect or gpu.link
        if name is None:
            raise ConfigError(
                f"gpu {gpu.name}: no measured all-reduce between its cards; say what connects them with "
                f"--interconnect ({', '.join(hardware.links)})"
            )
        link = hardware.link(name)
    title = gpu.name if gpus == 1 else f"{gpus} x {gpu.name}"
    if nodes > 1:
        title += f" on {nodes} nodes"
    return Machine(
        title=title,
        device=gpu.name,
        kind="gpu",
        gpu=gpu,
        processes=gpus,
        nodes=nodes,
        link=link,
        memory_bytes=gpu.memory_bytes,
        rates=rates,
    )
