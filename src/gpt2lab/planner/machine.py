"""What a run trains on: this machine as detected without torch, and its load; or a card by its name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2lab.distributed import processor
from gpt2lab.distributed.processor import smi
from gpt2lab.errors import ConfigError
from gpt2lab.planner.hardware import Gpu, Hardware, Link
from gpt2lab.planner.memory import Dtype
from gpt2lab.planner.timing import Rates, roofline

BUSY = 0.10  # share of the machine used by other programs from which a measurement is unreliable


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, how fast each is, and what connects them."""

    title: str
    is_cpu: bool  # it trains on its processor
    gpu: Gpu | None  # None: a CPU, or a GPU that is not in hardware.json
    world_size: int
    link: Link | None  # the slowest that an all-reduce crosses
    memory_bytes: float | None  # what one rank may use
    rates: Rates
    note: str | None = None  # why these rates
    # What events cost in runs of this machine, see `estimate.event_costs`.
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuState:
    """One GPU as nvidia-smi reports it now."""

    index: int
    name: str
    memory_total: float | None = None  # bytes; None of a MIG slice
    memory_free: float | None = None
    utilization: float | None = None  # percent
    driver: str = ""
    capability: str | None = None
    clock: str | None = None
    throttle: str | None = None
    power: str | None = None


@dataclass(frozen=True)
class DetectedHardware:
    """The GPUs of this machine, before a job is known."""

    gpus: tuple[GpuState, ...]

    @property
    def is_cpu(self) -> bool:
        """Tell whether training here means the processor."""
        return not self.gpus

    @property
    def busiest_gpu(self) -> float:
        """Return the utilization of the busiest GPU before our own work, 0 to 1."""
        return max((gpu.utilization or 0.0 for gpu in self.gpus), default=0.0) / 100

    def free_memory(self, ranks: int) -> float | None:
        """Return the bytes that each of `ranks` ranks of this machine could use; None where unknown."""
        if self.gpus:
            known = [gpu.memory_free for gpu in self.gpus if gpu.memory_free is not None]
            return min(known) if len(known) == len(self.gpus) else None  # of the fullest card
        available = available_memory()
        return available / ranks if available else None

    @property
    def auto_dtype(self) -> Dtype:
        """What `--dtype auto` takes here, as distributed.runtime decides."""
        if self.is_cpu:
            return "bf16" if processor.has_bf16() else "fp32"
        capability = float(self.gpus[0].capability or 8.0)
        return "bf16" if capability >= 8.0 else "fp16" if capability >= 7.0 else "fp32"


_PROC_STAT = Path("/proc/stat")
# An older driver may not know a field of the later groups, and then answers nothing at all.
_FIELDS = (
    ("index", "name", "memory.total", "memory.free", "driver_version", "uuid"),
    ("utilization.gpu", "compute_cap"),
    ("power.draw", "clocks.sm"),
    ("clocks_event_reasons.active",),
)


def detect_hardware(*, device: str = "auto") -> DetectedHardware:
    """Ask nvidia-smi for the GPUs that CUDA_VISIBLE_DEVICES leaves to a process; none if `device` is cpu.

    There are none without a driver, or without an answer in 20 seconds.
    """
    if device == "cpu":
        return DetectedHardware(())
    rows = _query(*_FIELDS)
    if not rows:  # one field that this driver does not know hides all
        rows, *others = (_query(fields) for fields in _FIELDS)
        for answer in others:
            rows = [one | more for one, more in zip(rows, answer or [{}] * len(rows), strict=True)]
    found = {
        row["uuid"]: GpuState(
            index=int(row["index"]),
            name=row["name"],
            memory_total=(_number(row["memory.total"]) or 0.0) * 2**20,
            memory_free=(_number(row["memory.free"]) or 0.0) * 2**20,
            utilization=_number(row.get("utilization.gpu", "")),
            driver=row["driver_version"],
            capability=_known(row.get("compute_cap", "")),
            clock=_known(row.get("clocks.sm", "")),
            throttle=_known(row.get("clocks_event_reasons.active", "")),
            power=_known(row.get("power.draw", "")),
        )
        for row in rows
        if row["index"].isdigit()
    }
    return DetectedHardware(_visible(found, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _query(*groups: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the fields of each GPU as nvidia-smi prints them; nothing if it does not know one of them."""
    names = [name for group in groups for name in group]
    text = smi(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(names, cells, strict=True)) for cells in rows if len(cells) == len(names)]


def _visible(found: dict[str, GpuState], chosen: str | None) -> tuple[GpuState, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES chooses, in its order and, as CUDA does, up to the first unknown one.

    A number counts cards as nvidia-smi does, which CUDA does too where they are alike. Nothing is known of a MIG slice.
    """
    if chosen is None or not found:
        return tuple(found.values())
    driver, visible = next(iter(found.values())).driver, list[GpuState]()
    for word in (word.strip() for word in chosen.split(",")):
        if word.startswith("MIG-"):
            visible.append(GpuState(len(visible), "MIG slice", driver=driver))
            continue
        named = (
            gpu
            for uuid, gpu in found.items()
            if word == str(gpu.index) or (word.startswith("GPU-") and uuid.startswith(word))
        )
        gpu = next(named, None)
        if gpu is None:
            break
        visible.append(gpu)
    return tuple(visible)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _known(cell: str) -> str | None:
    return None if cell in ("", "[N/A]", "N/A", "[Not Supported]") else cell


def available_memory() -> float | None:
    """Return the bytes that can be used without swapping, None if the system does not tell."""
    return _meminfo().get("MemAvailable")


def total_memory() -> float | None:
    """Return the bytes of memory and swap, None if the system does not tell."""
    found = _meminfo()
    return found["MemTotal"] + found.get("SwapTotal", 0.0) if "MemTotal" in found else None


def _meminfo() -> dict[str, float]:
    try:
        rows = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    except OSError:  # not Linux
        return {}
    return {row[0].rstrip(":"): float(row[1]) * 1024 for row in rows}


def load_average() -> float:
    """Return the mean number of processes that wanted a core in the last minute; 0 where unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def describe_load() -> str | None:
    """Say that other programs keep this machine's processor busy, so that it is slower than predicted; else None."""
    load, cores = load_average(), processor.cores()
    if load <= cores * 0.75:
        return None
    return f"machine busy: load {load:.1f} on {cores} cores; the times are for an idle one"


class Watch:
    """Counts the processor time of the machine and of this process with its finished children.

    If other programs use the processor, wall-clock times do not predict those of an idle machine.
    """

    def __init__(self) -> None:
        self._began = self._read()

    def others(self, ranks: int = 1) -> float | None:
        """Return the share of all cores that other programs used since the start, 0 to 1; None where unknown.

        `ranks`: of this machine, each of which uses as much as this process.
        """
        began, now = self._began, self._read()
        if began is None or now is None:
            return None
        machine, own, wall = (new - old for new, old in zip(now, began, strict=True))
        capacity = wall * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (machine - ranks * own) / capacity)) if capacity > 0 else None

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Return (busy seconds of all cores, stolen ones included; seconds of this process; clock)."""
        try:
            cells = [int(cell) for cell in _PROC_STAT.read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = (cells + [0] * 8)[:8]
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy, sum(os.times()[:4]), time.monotonic()


def core_flops() -> float:
    """Multiply fp32 matrices with numpy for 0.08 s of one core's time and return the best FLOP/s.

    It counts processor time on one thread, so that other programs do not make the machine look slow.
    """
    from threadpoolctl import threadpool_limits

    size, best = 512, 0.0
    left, right = np.ones((size, size), np.float32), np.ones((size, size), np.float32)
    out = np.empty_like(left)
    with threadpool_limits(1):
        began = time.thread_time()
        while time.thread_time() - began < 0.08:
            start = time.thread_time()
            np.matmul(left, right, out=out)
            best = max(best, 2 * size**3 / (time.thread_time() - start))
    return best


def named(
    gpu: Gpu,
    hardware: Hardware,
    *,
    gpus: int,
    compiled: bool,
    nodes: int = 1,
    interconnect: str | None = None,
) -> Machine:
    """Return a machine of `gpus` cards in all on `nodes` nodes, at the rates of the card's roofline.

    Raises: ConfigError if the nodes cannot share the cards evenly, or for a card without a rate or a known link.
    """
    rates = roofline(gpu, hardware, compiled=compiled)
    if gpus % nodes:
        raise ConfigError(
            f"gpus {gpus} (in all) do not spread evenly over {nodes} nodes; "
            f"try --gpus {nodes * max(1, round(gpus / nodes))}"
        )
    link = None
    if gpus > 1:
        name = gpu.link if interconnect is None and nodes == 1 else interconnect
        if name is None:
            unknown = f"gpu {gpu.name}: no measured all-reduce between its cards"
            raise ConfigError(
                f"{unknown if nodes == 1 else f'nodes {nodes}'}: name the network with --interconnect; "
                f"one of {', '.join(hardware.links)}"
            )
        link = hardware.link(name)
    title = gpu.name if gpus == 1 else f"{gpus} x {gpu.name}"
    if nodes > 1:
        title += f" on {nodes} nodes"
    return Machine(
        title=title,
        is_cpu=False,
        gpu=gpu,
        world_size=gpus,
        link=link,
        memory_bytes=gpu.memory_bytes,
        rates=rates,
    )
