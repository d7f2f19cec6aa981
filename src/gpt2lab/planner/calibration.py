"""This machine as a Machine: calibrated by its own runs, else by hardware.json, else by one small matmul. No torch.

Every finished run adds one line to `<checkpoint_dir>/calibration.jsonl`. The file stands beside the runs that it was
learned from: visible, movable and deletable with them. Every line names its device, so that a folder shared between
machines does not mix them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import files
from gpt2lab.config.schema import ModelConfig
from gpt2lab.config.settings import ARCHITECTURE, SIZES
from gpt2lab.distributed import processor
from gpt2lab.planner import machine, timing
from gpt2lab.planner.hardware import Gpu, Hardware, NoSourceError
from gpt2lab.planner.job import Job, ranks_and_micro_batch
from gpt2lab.planner.machine import DetectedHardware, Machine
from gpt2lab.planner.timing import MeasuredStep, Rates, fit_rates, work
from gpt2lab.runs.history import Log, stall_of

FILE = "calibration.jsonl"
MIN_STEPS = 8  # after the first of a start
WINSOR = 8.0  # a step longer than this many medians counts as that
# Of a line that counts.
_LINE = {
    **dict.fromkeys((*SIZES, "world", "micro_batch", "accumulation"), files.SIZE),
    "step_seconds": files.POSITIVE,
}
_COST = files.or_null((lambda value: files.is_number(value) and value >= 0, "a number"))
_MAY_HAVE = {"others": files.or_null(files.NUMBER), "ratios": files.object_of(_COST, "costs")}
SPREAD = {"roofline-prior": 0.25, "cpu-matmul": 1.0, "unknown": 1.0}  # of single rates, relative


def mean_step(seconds: Sequence[float] | np.ndarray) -> float:
    """Return the mean of step times, each clipped at eight medians, so that one stall does not set the pace."""
    return float(np.mean(np.minimum(seconds, WINSOR * np.median(seconds))))


def record_of(
    log: Log,
    environment: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    others: float | None,
    source: str,
    fewest: int = MIN_STEPS + 2,
) -> dict[str, Any] | None:
    """Return the calibration line of a run's last start, or None if it took too few steps.

    `environment` as in run.json, `config` as in config.json; `others`: share of the machine that other programs used.
    """
    taken, elapsed = log.last_start("step_seconds"), log.last_start("elapsed_seconds")[:1]
    shared = ranks_and_micro_batch(environment)
    if len(taken) < fewest or np.isnan(elapsed).any() or shared is None:
        return None
    step = mean_step(taken[2:])  # the first step compiles, the second may still touch fresh memory
    tokens, (world, micro) = config["total_batch_size"], shared
    timed = [e for e in log.events if e["attempt"] == log.last_attempt and (stall_of(e) or 0) > 0]
    compiling = max(0.0, float(taken[0]) - step)
    if environment["compile"] == "on" and "attention" in environment:  # which a GPU's run names
        first = next((e for e in timed if e["event"] == "eval"), None)  # it compiles too
        if first:
            timed.remove(first)
            compiling += first["seconds"]
    ratios = {
        "compile": compiling,
        **_event_ratios(timed, config, token_seconds=step / (tokens / world), world=world),
        "start": max(0.1, float(elapsed[0] - taken[0]) - log.seconds_before_first_step()),
    }
    cpu = np.nan_to_num(log.last_start("cpu_seconds")[2:])
    return {
        "time": float((log.last_step() or {})["time"]),
        "source": source,
        "device": environment["device"],
        "world": world,
        "threads": environment["threads"],
        "dtype": environment["dtype"],
        "compile": environment["compile"] == "on",
        **{name: config[name] for name in ARCHITECTURE if name in config},
        "micro_batch": micro,
        "recompute": config.get("activation_checkpointing", "none"),
        "parallel": config.get("parallel", "ddp") if world > 1 else "ddp",
        "optimizer": config.get("optimizer", "adamw"),
        "newton_schulz": config.get("newton_schulz", "fast"),
        "accumulation": tokens // config["context_length"] // world // micro,
        "steps": len(taken) - 2,
        "step_seconds": step,
        "cpu_seconds": mean_step(cpu) if cpu.all() else None,
        "peak_memory": int(np.nanmax(log.last_start("peak_memory_bytes"))),
        "ratios": ratios,
        "others": others,
    }


def _event_ratios(
    timed: list[dict[str, Any]], config: Mapping[str, Any], *, token_seconds: float, world: int
) -> dict[str, float]:
    """Return the median cost of each kind of event, as `estimate.event_costs` takes it.

    `token_seconds`: of training on one token, on one rank.
    """
    evals, scored, saves = (
        [e for e in timed if e["event"] == kind] for kind in ("eval", "hellaswag", "checkpoint")
    )
    texts = 2 if config.get("hellaswag_metrics", "all") == "all" else 1
    measured = {
        "eval": [e["seconds"] / (e["val_tokens"] / world) / token_seconds for e in evals],
        "hellaswag": [e["seconds"] / (e["n"] / world) / texts / token_seconds for e in scored],
        "checkpoint": [e["bytes"] / (stall_of(e) or math.inf) for e in saves],
    }
    return {kind: statistics.median(values) for kind, values in measured.items() if values}


def append(checkpoint_dir: Path, record: Mapping[str, Any]) -> None:
    """Add one complete line.

    Raises: OSError.
    """
    with open(checkpoint_dir / FILE, "ab", opener=files.regular) as file:
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def read(checkpoint_dir: Path) -> list[dict[str, Any]]:
    """Return the usable lines, oldest first; incomplete or edited lines are skipped."""
    path = checkpoint_dir / FILE
    if not path.is_file():
        return []
    records = []
    for line in files.read_regular(path, at_most=2**30).split(b"\n"):
        try:
            record = files.parse_json(line)
            if files.mismatch(record, _LINE, _MAY_HAVE) is None:
                _measured(record)
                records.append(record)
        except (KeyError, TypeError, ValueError):
            continue
    return records


def calibrate(
    prior: Rates, records: Sequence[Mapping[str, Any]], kind: Mapping[str, Any], *, spread: float
) -> tuple[Rates, dict[str, float]]:
    """Return rates fitted to this kind of machine's records, and the cost ratios of its events.

    Runs beside busy programs count only while there are no others: of equal work the fastest, and none for events.

    `kind`: keys that a record must have in common with the run to predict, with their values; None: any.
    """
    wanted = {key: value for key, value in kind.items() if value is not None}
    ddp = {"parallel": "ddp"}  # absent in older lines
    mine = [record for record in records if {**ddp, **record}.items() >= wanted.items()]
    quiet = [record for record in mine if (record.get("others") or 0.0) <= machine.BUSY][-200:]
    measured = [_measured(record) for record in quiet or mine[-200:]]
    if not quiet:  # Other programs only slow a run down.
        fastest_last = sorted(measured, key=lambda step: -step.seconds)
        measured = [*{step.work: step for step in fastest_last}.values()]
    ratios: dict[str, float] = {}
    for name in ("eval", "hellaswag", "checkpoint", "compile", "start"):
        values = [r["ratios"][name] for r in quiet if r.get("ratios", {}).get(name) is not None]
        if values:
            ratios[name] = statistics.median(values)
    return fit_rates(prior, measured, spread=spread), ratios


def _measured(record: Mapping[str, Any]) -> MeasuredStep:
    sizes = {name: record[name] for name in SIZES}
    options = {name: record[name] for name in ARCHITECTURE if name in record}  # older lines: none
    model = ModelConfig(**{**options, **sizes})
    amount = work(
        model,
        micro_batch=record["micro_batch"],
        accumulation=record["accumulation"],
        recompute=record.get("recompute", "none"),  # absent: written before there was any
        optimizer=record.get("optimizer", "adamw"),
        newton_schulz=record.get("newton_schulz", "fast"),
        updaters=1 if record.get("parallel", "ddp") == "ddp" else record["world"],
    )
    noisy = (record.get("others") or 0.0) > machine.BUSY
    return MeasuredStep(amount, record["step_seconds"], sigma=0.3 if noisy else 0.05)


def this_machine(
    detected: DetectedHardware,
    hardware: Hardware,
    records: Sequence[Mapping[str, Any]],
    job: Job,
    *,
    device: str | None = None,
    threads: int | None = None,
) -> Machine:
    """Return this machine with the best known rates for a job, and what events cost in its runs.

    `device`, `threads`: the GPU's name and a rank's threads where the caller (the trainer) knows them.

    Raises: NoSourceError for a GPU that neither hardware.json nor a run knows.
    """
    on_cpu, world_size = detected.is_cpu and device is None, job.world_size
    gpu, used = None, None
    if on_cpu:
        name, cores = processor.cpu_name(), processor.cores()
        title = f"this machine's CPU, {cores} cores"
        memory = detected.free_memory(world_size)
        typed = os.environ.get("OMP_NUM_THREADS", "")
        # torchrun gives each of several ranks one thread.
        alone = int(typed) if typed.isdigit() else cores if world_size == 1 else 1
        used = threads or alone
        own, bf16 = min(used or 1, cores), job.dtype == "bf16" and detected.auto_dtype == "bf16"
        speed = own * machine.core_flops()
        note = f"a numpy matmul at {speed / 1e9:,.0f} GFLOP/s on {own} of {cores} cores"
        prior = timing.processor(speed, hardware, bf16=bf16, compiled=job.compiled)
    else:
        name = device or detected.gpus[0].name
        gpu = hardware.recognise(name)
        memory = gpu.memory_bytes if gpu else None
        if detected.gpus:
            memory = detected.gpus[0].memory_free
        title = name if world_size == 1 else f"{world_size} x {name}"
        is_measured = any(record.get("device") == name for record in records)
        prior, note = _gpu_prior(name, gpu, hardware, job, is_measured=is_measured)
    kind = {"device": name, "world": world_size, "threads": used, "dtype": job.dtype}
    kind |= {"compile": job.compiled, "parallel": job.parallel}
    rates, ratios = calibrate(prior, records, kind, spread=SPREAD[prior.source])
    if prior.source == "unknown" and not rates.observations:
        raise NoSourceError(
            f"gpu {name!r}: its measured runs had another dtype, compile or world size; --measure this one"
        )
    if rates.observations:
        note = f"{rates.observations} measured runs of this machine"
    link = hardware.link(gpu.link) if gpu and gpu.link and world_size > 1 else None
    return Machine(title, on_cpu, gpu, world_size, link, memory, rates, note, ratios)


def _gpu_prior(
    name: str, gpu: Gpu | None, hardware: Hardware, job: Job, *, is_measured: bool
) -> tuple[Rates, str]:
    """Return a GPU's rates before any run like the job was measured, and their source in words."""
    is_known = gpu is not None and gpu.peak_flops is not None and gpu.bandwidth is not None
    if gpu is not None and is_known and gpu.has_rate(job.dtype):
        rates = timing.roofline(gpu, hardware, compiled=job.compiled)
        return rates, f"hardware.json version {hardware.version}"
    if not is_measured:
        raise NoSourceError(
            f"gpu {name!r}: no rate of {job.dtype} in hardware.json, and no run on it was measured here: "
            f"gpt2lab estimate --measure"
        )
    reference = timing.roofline(hardware.gpu("H100"), hardware, compiled=job.compiled)
    rates = Rates(reference.seconds_per_unit, np.full((7, 7), 9.0), "unknown")
    return rates, "no data sheet known"
