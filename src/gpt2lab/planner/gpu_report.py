"""What the devices of this machine are and what a job would need of them, for people; works without a GPU too."""

from __future__ import annotations

import dataclasses
import json
import shutil

from gpt2lab import fmt
from gpt2lab.planner import hardware, machine, profiles, report_json
from gpt2lab.planner.ask import Ask, check
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.machine import GpuState
from gpt2lab.planner.memory import PARTS
from gpt2lab.planner.report_text import GIB
from gpt2lab.planner.setting import Setting


def print_devices(*, as_json: bool) -> int:
    """Print the GPUs: driver, capability, bf16, memory, topology, the peak used for MFU; or say there is none."""
    known, found = hardware.load(), machine.gpus()
    available = machine.available_memory()
    if as_json:
        document = {
            "gpus": [_as_json(gpu, known) for gpu in found],
            "topology": _topology(found) or None,
            "cpu": {
                "name": machine.cpu_name(),
                "cores": machine.cores(),
                "bf16": machine.has_bf16(),
                "memory_available": available,
                "load_average": machine.load_average(),
            },
        }
        print(json.dumps(document))
        return 0
    if not found:
        why = (
            "nvidia-smi is not on the PATH"
            if shutil.which("nvidia-smi") is None
            else "nvidia-smi names none"
        )
        print(f"no GPU: {why}; training would use the processor")
    else:
        cells = [_cells(gpu, known) for gpu in found]
        header = [
            "GPU",
            "name",
            "capability",
            "bf16",
            "free GiB",
            "of",
            "busy",
            "clock",
            "peak TFLOP/s",
        ]
        print(fmt.table(header, cells))
        print(f"driver {found[0].driver}; peak = dense bf16 of hardware.json, used for MFU")
        for gpu in found:
            if gpu.throttle not in (None, "0x0000000000000000", "0x0000000000000001"):
                print(
                    f"GPU {gpu.index} is throttled: event reasons {gpu.throttle} (nvidia-smi -q -d PERFORMANCE)"
                )
        if text := _topology(found):
            print(text)
    memory = "unknown" if available is None else f"{available / GIB:.1f} GiB free"
    bf16 = "bf16 in hardware" if machine.has_bf16() else "no bf16 in hardware: fp32"
    print(
        f"CPU  {machine.cpu_name()}, {machine.cores()} cores, {bf16}, memory {memory}, "
        f"load average {machine.load_average():.2f}"
    )
    return 0


def _cells(gpu: GpuState, known: Hardware) -> list[str]:
    card = known.recognise(gpu.name)
    peak = "n/a" if card is None or card.peak_flops is None else f"{card.peak_flops / 1e12:,.0f}"
    return [
        str(gpu.index),
        gpu.name,
        gpu.capability or "n/a",
        _bf16(gpu),
        f"{gpu.memory_free / GIB:.1f}",
        f"{gpu.memory_total / GIB:.1f}",
        "n/a" if gpu.utilization is None else f"{gpu.utilization:.0f} %",
        "n/a" if gpu.clock is None else f"{gpu.clock} MHz",
        peak,
    ]


def _bf16(gpu: GpuState) -> str:
    if gpu.capability is None:
        return "n/a"
    return "yes" if float(gpu.capability) >= 8.0 else "no"


def _as_json(gpu: GpuState, known: Hardware) -> dict[str, object]:
    card = known.recognise(gpu.name)
    return {
        "index": gpu.index,
        "name": gpu.name,
        "capability": gpu.capability,
        "bf16": _bf16(gpu),
        "driver": gpu.driver,
        "memory_total": gpu.memory_total,
        "memory_free": gpu.memory_free,
        "utilization": gpu.utilization,
        "peak_flops": card.peak_flops if card else None,
    }


def _topology(found: list[GpuState]) -> str:
    return machine.smi("topo", "-m").rstrip() if len(found) > 1 else ""


def print_memory(ask: Ask) -> int:
    """Print the predicted peak by category against what is free here; return 3 if it does not fit.

    Raises: ConfigError for settings that cannot work.
    """
    check(ask)
    known = hardware.load()
    setting = Setting(ask, known)
    job = setting.job(profiles.find(ask.profile, known))
    on, _ = setting.machine_for(job)
    found = setting.predict_on(on, {}, job, profiles.find(ask.profile, known))
    need, parts = found.memory, found.memory.tensors
    if ask.json:
        document = report_json.as_json(
            found, profile_name=ask.profile or profiles.DEFAULT, window=None
        )
        print(json.dumps(document, allow_nan=False))
    else:
        model = job.config.model
        print(
            f"{model.model} {fmt.count(job.parameters)}, T {model.context_length}, micro-batch {job.micro_batch} x "
            f"accumulation {job.accumulation} x {job.world}, {job.dtype}, on {on.title}"
        )
        rows = [[part.replace("_", " "), f"{getattr(parts, part) / GIB:.2f}"] for part in PARTS]
        rows += [["overhead", f"{need.overhead / GIB:.2f}"], ["in all", f"{need.needed / GIB:.2f}"]]
        rows += [["free", "unknown" if need.available is None else f"{need.available / GIB:.2f}"]]
        print(fmt.table([f"at {parts.peak_at}", "GiB"], rows))
        largest = need.largest_micro_batch
        if need.fits is None:
            print("how much memory there is is not known here")
        elif need.fits:
            print(
                f"fits; the largest micro-batch that leaves {1 - need.target:.0%} free is {largest}"
            )
        else:
            remedy = (
                f"--mini_batch_size {largest} does"
                if largest
                else "not even one sequence at a time does; a smaller --model or --context_length may"
            )
            print(f"does not fit into the {need.target:.0%} of it that a run may take; {remedy}")
    return 3 if need.fits is False else 0


def print_hardware(known: Hardware, *, as_json: bool) -> int:
    """List cards and links with their numbers."""
    if as_json:
        cards = {name: dataclasses.asdict(gpu) for name, gpu in known.gpus.items()}
        links = {name: dataclasses.asdict(link) for name, link in known.links.items()}
        print(
            json.dumps(
                {"version": known.version, "gpus": cards, "links": links, "sources": known.sources}
            )
        )
        return 0

    def number(value: float | None, unit: float, places: int = 0) -> str:
        return "n/a" if value is None else f"{value / unit:,.{places}f}"

    rows = [
        [
            gpu.name,
            number(gpu.peak_flops, 1000000000000.0),
            number(gpu.matmul_flops, 1000000000000.0),
            number(gpu.memory_bytes, 2**30, 1),
            number(gpu.bandwidth, 1000000000.0),
            gpu.link or "n/a",
            "n/a" if gpu.usd_per_hour is None else f"{gpu.usd_per_hour:.2f}",
            gpu.price_date or "",
            gpu.note or "",
        ]
        for gpu in known.gpus.values()
    ]
    header = ["card", "bf16 TFLOP/s", "best matmul", "GiB", "GB/s", "link", "$/h", "price of", ""]
    print(fmt.table(header, rows))
    print()
    print(
        fmt.table(
            ["interconnect", "GB/s at 32 MiB", ""],
            [
                [link.name, f"{link.rate(32 * 2**20) / 1e9:.1f}", link.title]
                for link in known.links.values()
            ],
        )
    )
    print(f"\nhardware.json version {known.version}; every number's source stands there")
    return 0
