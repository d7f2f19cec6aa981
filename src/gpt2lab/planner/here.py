"""This machine as a Machine of the planner: calibrated by its own runs, by hardware.json, or by one small matmul."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt2lab.config.schema import Parallel
from gpt2lab.errors import NoSourceError
from gpt2lab.planner import calibration, machine, timing
from gpt2lab.planner.calibration import Kind
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.machine import Machine
from gpt2lab.planner.memory import Dtype
from gpt2lab.planner.timing import Rates

SPREAD = {"roofline-prior": 0.25, "cpu-matmul": 1.0, "unknown": 1.0}


@dataclass(frozen=True)
class Seen:
    """What a look at this machine shows, before a job is known."""

    gpus: tuple[machine.GpuState, ...]

    @property
    def is_cpu(self) -> bool:
        """Tell whether training here means the processor."""
        return not self.gpus

    @property
    def busiest_gpu(self) -> float:
        """Return how busy the busiest GPU was, 0 to 1: with others' work, as none of ours ran yet."""
        return max((gpu.utilization or 0.0 for gpu in self.gpus), default=0.0) / 100

    @property
    def native_bf16(self) -> bool:
        """Tell whether bf16 runs in hardware here."""
        if self.is_cpu:
            return machine.has_bf16()
        capability = self.gpus[0].capability
        return capability is None or float(capability) >= 8.0


def look() -> Seen:
    """Look for GPUs."""
    return Seen(tuple(machine.gpus()))


def here(
    seen: Seen,
    hardware: Hardware,
    records: Sequence[Mapping[str, Any]],
    *,
    processes: int,
    dtype: Dtype,
    compiled: bool,
    parallel: Parallel = "ddp",
    device: str | None = None,
    threads: int | None = None,
) -> tuple[Machine, dict[str, float]]:
    """Return this machine with the best rates there are, and the event costs that its runs showed.

    `device`, `threads`: the GPU's name and a process's threads where the caller (the trainer) knows them.

    Raises: NoSourceError for a GPU that neither hardware.json nor a run knows.
    """
    on_cpu = seen.is_cpu and device is None
    if on_cpu:
        name, gpu = machine.cpu_name(), None
        available = machine.available_memory()
        memory = available / processes if available else None
        title = f"this machine's CPU, {machine.cores()} cores"
    else:
        name = device or seen.gpus[0].name
        gpu = hardware.recognise(name)
        memory = seen.gpus[0].memory_free if seen.gpus else (gpu.memory_bytes if gpu else None)
        title = name if processes == 1 else f"{processes} x {name}"
    used = (threads or _threads(processes)) if on_cpu else None
    kind = Kind(name, processes, used, dtype, compiled, parallel)
    same = [record for record in records if record.get("device") == name]
    if on_cpu:
        cores = min(used or 1, machine.cores())
        speed = cores * machine.core_flops()
        prior = timing.processor(speed, hardware, bf16=dtype == "bf16" and seen.native_bf16)
        note = f"a numpy matmul at {speed / 1e9:,.0f} GFLOP/s on {cores} of {machine.cores()} cores"
    elif gpu is not None and gpu.peak_flops is not None and gpu.bandwidth is not None:
        prior = timing.roofline(gpu, hardware, compiled=compiled)
        note = f"hardware.json version {hardware.version}"
    elif same:
        reference = timing.roofline(hardware.gpu("H100"), hardware, compiled=compiled)
        prior = Rates(reference.seconds_per_unit, np.full((6, 6), 9.0), "unknown")
        note = "no data sheet known"
    else:
        raise NoSourceError(
            f"gpu {name!r} is not in hardware.json and no run of it was measured here: "
            f"python scripts/estimate_time.py --measure"
        )
    rates, ratios = calibration.calibrate(prior, records, kind, spread=SPREAD[prior.source])
    if prior.source == "unknown" and not rates.observations:
        raise NoSourceError(
            f"gpu {name!r}: its measured runs had another dtype, compile or number of processes; --measure this one"
        )
    if rates.observations:
        note = f"{rates.observations} measured runs of this machine"
    link = hardware.link(gpu.link) if gpu and gpu.link and processes > 1 else None
    return (
        Machine(
            title=title,
            device=name,
            kind="cpu" if on_cpu else "gpu",
            gpu=gpu,
            processes=processes,
            nodes=1,
            link=link,
            memory_bytes=memory,
            rates=rates,
            note=note,
        ),
        ratios,
    )


def _threads(processes: int) -> int:
    """Return the threads of one process: torchrun gives each of several processes one."""
    typed = os.environ.get("OMP_NUM_THREADS", "")
    if typed.isdigit():
        return int(typed)
    return 1 if processes > 1 else machine.cores()
