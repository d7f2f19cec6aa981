"""An estimate as one JSON object: the keys are a contract, and every mode has all of them, null where unknown."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2lab.model.counts import count_parameters
from gpt2lab.planner.deadline import Window, verdict
from gpt2lab.planner.estimate import Estimate
from gpt2lab.planner.interval import Interval
from gpt2lab.planner.memory import PARTS

SCHEMA = "gpt2-estimate/1"
KEYS = (
    *("schema", "timestamp", "max_training_hours", "profile_name", "profile", "estimate"),
    *("dataset_info", "throughput", "breakdown", "memory", "scaling", "milestones", "cost", "loss"),
    *("actual", "model", "run", "comparison", "batch_search", "warnings"),
)


def blank() -> dict[str, Any]:
    """Return an object with every key and nothing known."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return dict.fromkeys(KEYS) | {"schema": SCHEMA, "timestamp": now}


def bounds(interval: Interval | None) -> dict[str, Any]:
    """Return value, low, high."""
    if interval is None:
        return {"value": None, "low": None, "high": None}
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def as_json(
    estimate: Estimate,
    *,
    profile_name: str,
    window: Window | None,
    quality: str = "ok",
    scaling: Sequence[Mapping[str, Any]] = (),
    milestones: Sequence[Mapping[str, Any]] = (),
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the object for one estimate."""
    job, need, hours = estimate.job, estimate.memory, estimate.seconds.scaled(1 / 3600)
    judged = verdict(estimate, window) if window else None
    cost = estimate.cost
    return blank() | {
        "max_training_hours": window.seconds / 3600 if window else None,
        "profile_name": profile_name,
        "profile": {
            "batch_size": job.micro_batch,
            "gradient_accumulation_steps": job.accumulation,
            "max_length": job.config.model.context_length,
            "estimated_throughput": estimate.throughput.value,
            "memory_usage_gb": need.needed / 1e9,
            "largest_batch_size": need.largest_micro_batch,
            "processes": job.world,
            "machine": estimate.machine.title,
            "dtype": job.dtype,
            "compile": job.compiled,
        },
        "estimate": {
            "total_steps": job.max_steps,
            "estimated_hours": hours.value,
            "fits_in_window": None if judged is None else judged == "fits",
            "verdict": judged,
            "low_hours": hours.low,
            "high_hours": hours.high,
            "sigma_log": estimate.sigma,
            "step_seconds": bounds(estimate.step),
            "safety_margin_hours": window.margin / 3600 if window else None,
        },
        "dataset_info": dict(job.dataset) | {"epochs": job.epochs, "training_tokens": job.tokens},
        "throughput": bounds(estimate.throughput)
        | {"source": estimate.machine.rates.source, "quality": quality, "mfu": estimate.mfu},
        "breakdown": {f"{name}_s": part.value for name, part in estimate.breakdown.items()},
        "memory": {part: getattr(need.tensors, part) for part in PARTS}
        | {
            "context": need.overhead,
            "total": need.needed,
            "available": need.available,
            "fits": need.fits,
            "peak_at": need.tensors.peak_at,
        },
        "scaling": list(scaling),
        "milestones": list(milestones),
        "cost": None
        if cost is None
        else {
            "usd": cost.usd.value,
            "usd_low": cost.usd.low,
            "usd_high": cost.usd.high,
            "price_per_gpu_hour": cost.price_per_gpu_hour,
            "price_source": cost.source,
            "price_date": cost.date,
            "kwh": cost.kwh,
        },
        "loss": None
        if estimate.loss is None
        else bounds(estimate.loss) | {"law": "besiroglu2024+offset", "data": "FineWeb, GPT-2 BPE"},
        "model": {
            "parameters": count_parameters(job.config.model),
            "flops_per_token": job.flops_per_token,
        },
        "warnings": list(warnings),
    }
