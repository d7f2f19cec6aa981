"""An estimate as a report: one screen of text, one JSON object, every formula with its numbers. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpt2lab import fmt
from gpt2lab.config.schema import Parallel
from gpt2lab.config.settings import options_of
from gpt2lab.model.counts import checkpoint_bytes, count_matmul_parameters
from gpt2lab.planner.communication import OVERLAP, step_bytes, wire_share
from gpt2lab.planner.estimate import EVENTS, LAW, LOSS_FORMULA, Estimate, Window, loss_of, verdict
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.timing import KINDS, MUON_ROUNDS, muon_flops
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.training.progress import Z80, Interval

GIB = 2**30


def _row(name: str, value: str, interval: str = "", note: str = "") -> str:
    return f"{name:<12} {value:<14} {interval:<22} {note}".rstrip()


def hours(interval: Interval) -> str:
    """Write the bounds of a time span."""
    return f"{fmt.duration(interval.low)} ... {fmt.duration(interval.high)}"


def describe_job(estimate: Estimate) -> str:
    """Name the job and what it runs on, in one line."""
    job, T = estimate.job, estimate.job.config.model.context_length
    name = job.config.model.model
    return (
        f"{name} {fmt.count(job.parameters)}, T {T} | {fmt.count(job.tokens)} tokens = {job.max_steps:,} steps x "
        f"{job.config.batch.total_batch_size:,} | {estimate.machine.title} | {job.dtype}, "
        f"{'compiled' if job.compiled else 'not compiled'}"
    )


def _source(estimate: Estimate) -> str:
    machine, spread = estimate.machine, math.exp(Z80 * estimate.sigma)
    source = machine.rates.source
    priors = {
        "roofline-prior": "roofline of data sheet and measured matmul, not calibrated",
        "cpu-matmul": "a matrix product on this CPU, not calibrated",
    }
    note = f" ({machine.note})" if machine.note else ""
    hint = "; --measure narrows it" if source in priors else ""
    said = f"{priors.get(source, source)}{note}: 80 % interval x/÷ {spread:.2f}"
    return f"{'source':<12} {said}{hint}"


def describe_estimate(
    estimate: Estimate,
    *,
    now: float,
    window: Window | None = None,
    extra: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Write the full estimate; `now` is when the run starts, Unix seconds."""
    lines = [
        describe_job(estimate),
        _source(estimate),
        *_speed(estimate),
        *describe_memory(estimate),
    ]
    lines += [*_time(estimate, now), *_money(estimate), *_loss(estimate)]
    if passes := estimate.job.epochs_by_source:
        text = ", ".join(f"{name} {epochs:.2f}" for name, epochs in passes.items())
        lines.append(f"{'epochs':<12} {text}")
    if window is not None:
        lines.append(_verdict(estimate, window))
    lines += [f"{'warning':<12} {warning}" for warning in warnings]
    return "\n".join([*lines, *extra])


def _speed(estimate: Estimate) -> list[str]:
    rate, step, job = estimate.throughput, estimate.step, estimate.job
    gpu, mfu = estimate.machine.gpu, ""
    if estimate.mfu is not None and gpu is not None and gpu.peak_flops is not None:
        peak = f"{gpu.peak_flops / 1e12:,.0f} TFLOP/s dense {gpu.dtype}"
        mfu = f"MFU {estimate.mfu:.0%} of {peak} (6 N + 12 L C T)"
    cut = (
        f"micro-batch {job.micro_batch} x accumulation {job.accumulation} x world {job.world_size}"
    )
    bounds = f"{fmt.count(rate.low)} ... {fmt.count(rate.high)}"
    return [
        _row("throughput", f"{fmt.count(rate.value)} tok/s", bounds, mfu),
        _row("step", seconds(step.value), f"{seconds(step.low)} ... {seconds(step.high)}", cut),
    ]


def seconds(value: float) -> str:
    """Write a short time span."""
    if value < 10:
        return f"{value * 1000:,.0f} ms"
    return f"{value:,.1f} s" if value < 100 else f"{value:,.0f} s"


def describe_memory(estimate: Estimate) -> list[str]:
    """Write what a rank needs, in GiB, when that is, and whether it fits."""
    need, parts = estimate.memory, estimate.memory.tensors
    available = "" if need.available is None else f"of {need.available / GIB:.1f}"
    state = parts.params + parts.optimizer + parts.gradients
    shares = [
        f"weights, moments, gradients {state / GIB:.1f}",
        f"activations {parts.activations / GIB:.1f}",
        f"logits {parts.head / GIB:.1f}",
        f"bf16 copies {parts.bf16_weights / GIB:.1f}",
        f"overhead {need.overhead / GIB:.1f}",
    ]
    is_eager = estimate.job.compiled and estimate.machine.is_cpu
    peak = f"peak at {parts.peak_at}{', as if not compiled' if is_eager else ''}"
    lines = [
        _row("memory", f"{need.needed / GIB:.1f} GiB", available, ", ".join(shares)),
        _row("", "", "", peak),
    ]
    largest = need.largest_micro_batch
    if need.fits is False and largest is None:
        lines.append(_row("", "DOES NOT FIT", "", "not even one sequence at a time"))
    elif need.available is not None:
        verb = "fits" if need.fits else f"DOES NOT FIT with {estimate.job.micro_batch}"
        lines[1] += f"; {verb}; largest micro-batch that fits {need.target:.0%}: {largest}"
    return lines


def _time(estimate: Estimate, now: float) -> list[str]:
    parts, job = estimate.breakdown, estimate.job
    events = sum(part.value for name, part in parts.items() if name != "train")
    counts = [f"{job.count(kind):,} {kind}" for kind in EVENTS if job.count(kind)]
    each = fmt.num_bytes(checkpoint_bytes(job.config))
    span = estimate.seconds
    form = "%Y-%m-%d" if span.value > 100 * 86_400 else "%m-%d %H:%M"
    finish = [fmt.moment(now + end, form) for end in (span.value, span.low, span.high)]
    kinds, ends = f"start, compile, {', '.join(counts)} of {each}", f"({finish[1]} ... {finish[2]})"
    share = f"{estimate.event_share:.0%} of the time"
    return [
        _row("training", fmt.duration(parts["train"].value), hours(parts["train"])),
        _row("events", fmt.duration(events), share, kinds),
        _row("TOTAL", fmt.duration(span.value), hours(span), f"finishes {finish[0]} {ends}"),
    ]


def _money(estimate: Estimate) -> list[str]:
    cost = estimate.cost
    if cost is None:
        return []
    dated = f", {cost.date}; --price changes it" if cost.date else ""
    energy = f"; about {cost.energy_kwh:,.0f} kWh" if cost.energy_kwh else ""
    bounds = f"{dollars(cost.usd.low)} ... {dollars(cost.usd.high)}"
    note = f"at ${cost.price_per_gpu_hour:g} per GPU-hour ({cost.source}{dated}){energy}"
    return [_row("cost", dollars(cost.usd.value), bounds, note)]


def dollars(value: float) -> str:
    """Write an amount of money."""
    return f"${value:,.0f}" if value >= 10 else f"${value:.2f}"


def _loss(estimate: Estimate) -> list[str]:
    job = estimate.job
    loss = loss_of(job)
    ratio = f"{job.tokens / job.parameters:.0f} tokens a parameter"
    if estimate.ladder is not None and estimate.loss is not None:
        own, note = estimate.loss, f"{estimate.ladder.note(job)}; {ratio}"
        return [_row("loss", f"{own.value:.3f}", f"{own.low:.3f} ... {own.high:.3f}", note)]
    if job.config.model.id_limit != GPT2.size:
        return [_row("loss", "n/a", "", f"the law holds for GPT-2's {GPT2.size:,} ids; {ratio}")]
    if not job.is_gpt2:
        said = "" if loss is None else f"; for that it predicts {loss.low:.2f} ... {loss.high:.2f}"
        return [_row("loss", "n/a", "", f"the law holds for GPT-2 with AdamW{said}; {ratio}")]
    if loss is None:
        return [_row("loss", "n/a", "", f"the scaling law holds from 40M parameters up; {ratio}")]
    note = f"FineWeb validation loss, for ranking sizes; {ratio}"
    return [_row("loss", f"{loss.value:.2f}", f"{loss.low:.2f} ... {loss.high:.2f}", note)]


def _verdict(estimate: Estimate, window: Window) -> str:
    judged = verdict(estimate, window)
    meaning = {
        "fits": "the upper bound is within the window",
        "borderline": "the estimate is within, the upper bound is not",
        "does_not_fit": "not within the window"
        if estimate.memory.fits is not False
        else "does not fit the memory",
    }[judged]
    budget = f"{fmt.duration(window.seconds)} less {fmt.duration(window.margin)}"
    return _row("window", judged.upper().replace("_", " "), budget, meaning)


def describe_actual(actual: Mapping[str, Any]) -> str:
    """Write what a finished run was forecast to take and took, given the `actual` of its estimate.json."""
    inside = "inside" if actual.get("inside_interval") else "outside"
    return (
        f"{fmt.duration(36 * actual['time_accuracy'] * actual['hours'])}, "
        f"actual {fmt.duration(3600 * actual['hours'])}: {inside} its 80 % interval"
    )


SCHEMA = "gpt2-estimate/1"
KEYS = (
    *("schema", "timestamp", "max_training_hours", "profile_name", "profile", "estimate"),
    *("dataset_info", "throughput", "breakdown", "memory", "scaling", "milestones", "cost", "loss"),
    *("actual", "model", "run", "comparison", "batch_search", "warnings"),
    *("data_advice", "learning_rate", "accuracy"),
)


def blank_report() -> dict[str, Any]:
    """Return an object with every key and nothing known."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return dict.fromkeys(KEYS) | {"schema": SCHEMA, "timestamp": now}


def estimate_as_json(
    estimate: Estimate,
    profile_name: str,
    *,
    window: Window | None = None,
    scaling: Sequence[Mapping[str, Any]] = (),
    milestones: Sequence[Mapping[str, Any]] = (),
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the object for one estimate."""
    job, need, cost = estimate.job, estimate.memory, estimate.cost
    hours = estimate.seconds.scaled(1 / 3600)
    judged = verdict(estimate, window) if window else None
    loss, ladder, law, data = estimate.loss, estimate.ladder, LAW, "FineWeb, GPT-2 BPE"
    if ladder is not None:
        law, data = f"ladder {ladder.name}", ladder.settings["data_name"]
    return blank_report() | {
        "max_training_hours": window.seconds / 3600 if window else None,
        "profile_name": profile_name,
        "profile": {
            "batch_size": job.micro_batch,
            "gradient_accumulation_steps": job.accumulation,
            "max_length": job.config.model.context_length,
            "estimated_throughput": estimate.throughput.value,
            "memory_usage_gb": need.needed / 1e9,
            "largest_batch_size": need.largest_micro_batch,
            "processes": job.world_size,
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
            "step_seconds": asdict(estimate.step),
            "safety_margin_hours": window.margin / 3600 if window else None,
        },
        "dataset_info": {**job.dataset}
        | {"epochs": job.epochs, "training_tokens": job.tokens}
        | ({"epochs_by_source": job.epochs_by_source} if job.epochs_by_source else {}),
        "throughput": asdict(estimate.throughput)
        | {"source": estimate.machine.rates.source, "quality": "ok", "mfu": estimate.mfu},
        "breakdown": {f"{name}_s": part.value for name, part in estimate.breakdown.items()},
        "memory": {
            **asdict(need.tensors),
            "context": need.overhead,
            "total": need.needed,
            "available": need.available,
            "fits": need.fits,
        },
        "scaling": list(scaling),
        "milestones": list(milestones),
        "cost": cost
        and {
            "usd": cost.usd.value,
            "usd_low": cost.usd.low,
            "usd_high": cost.usd.high,
            "price_per_gpu_hour": cost.price_per_gpu_hour,
            "price_source": cost.source,
            "price_date": cost.date,
            "kwh": cost.energy_kwh,
        },
        "loss": loss and asdict(loss) | {"law": law, "data": data},
        "model": {"parameters": job.parameters, "flops_per_token": job.flops_per_token},
        "warnings": list(warnings),
    }


_HIDDEN: dict[Parallel, str] = {
    "ddp": "hidden behind {share:g} x 2/3 of the last micro-batch, except the embedding's {embedding:,.0f} MB",
    "zero1": "gradients hidden behind {share:g} x 2/3 of the last micro-batch, except the embedding's "
    "{embedding:,.0f} MB; new weights not",
    "fsdp": "hidden behind {share:g} of each micro-batch, except the first block's and what is outside the blocks",
}


def _communication(found: Estimate, link: str) -> str:
    job, model = found.job, found.job.config.model
    terms = [
        f"{kind.replace('_', '-')} {wire_share(kind, world_size=job.world_size):.3g} x {size / 1e6:,.0f} MB"
        for kind, size in step_bytes(job).items()
    ]
    hidden = _HIDDEN[job.parallel].format(
        share=OVERLAP, embedding=4 * model.vocab_size * model.n_embd / 1e6
    )
    spent = f"{found.communication_seconds * 1000:,.2f} ms"
    return f"{' + '.join(terms)} over {link} = {spent}, {hidden}"


def formulas(found: Estimate, known: Hardware) -> list[str]:
    """Return every formula with its numbers, line by line."""
    job, model, on = found.job, found.job.config.model, found.machine
    L, C, T, V = model.n_layer, model.n_embd, model.context_length, model.vocab_size
    matrices, options = count_matmul_parameters(model), options_of(model)
    counted = f"counted with {options}" if options else "VC + TC + L(12 CC + 13 C) + 2C"
    text = [
        f"N       = {counted}, V {V}, C {C}, T {T}, L {L} = {job.parameters:,}",
        f"N_mm    = 12 L CC + VC = {matrices:,}",
        f"F/token = 6 N_mm + 12 L C T = {job.flops_per_token:,}  (PaLM, arXiv:2204.02311 B)",
        f"run     = F/token x {job.tokens:,} tokens = {job.flops_per_token * job.tokens:.3g} FLOP",
    ]
    gpu = on.gpu
    if gpu is not None and gpu.peak_flops:
        k, compiled = known.constants, job.compiled
        matmul = gpu.sustained_flops(k["matmul_fraction_unmeasured"]) or 0.0
        basis = "measured" if gpu.matmul_flops else "not measured"
        moved = 1.0 if compiled else k["eager_bytes_factor"]
        kernels = k["kernels_per_block" if compiled else "kernels_per_block_eager"]
        text.append(
            f"roofline: FLOPs / ({k['matmul_efficiency']:g} x matmul), {gpu.name} {gpu.peak_flops / 1e12:.0f} TFLOP/s, "
            f"matmul {matmul / 1e12:.0f} ({basis}); "
            f"{moved:g} x ({k['stream_bytes_per_token_layer_channel']:g} L C + {k['stream_bytes_per_logit']:g} V) "
            f"bytes / ({k['bandwidth_efficiency']:g} x {(gpu.bandwidth or 0) / 1e9:.0f} GB/s) + "
            f"{k['stream_seconds_per_token_layer_channel'] * 1e12:g} ps x L C; "
            f"{kernels:g} kernels a block x {k['launch_seconds'] * 1e6:g} us"
        )
    for kind, units, rate in zip(KINDS, job.work, on.rates.seconds_per_unit, strict=True):
        text.append(f"  {kind:<10} {units:.4g} x {rate:.4g} s = {units * rate * 1000:,.2f} ms")
    if job.config.optim.has_muon:
        how = job.config.optim.newton_schulz
        rounds, flops = MUON_ROUNDS[how], muon_flops(model, how)
        text.append(f"  Muon's {rounds} rounds: {rounds} x 60 L CCC = {flops:.4g} FLOP")
    if found.communication_seconds and on.link is not None:
        text.append(_communication(found, on.link.title))
    need = found.memory.tensors
    optimizer = "Muon and AdamW" if job.config.optim.has_muon else "AdamW 8 N"
    text += [
        f"step    = {found.step.value * 1000:,.1f} ms; sigma of its logarithm {found.sigma:.3f}, "
        f"80 % = x/÷ e^({Z80:.2f} sigma)",
        f"memory  : 4 N {need.params:,} + {optimizer} {need.optimizer:,} + gradients {need.gradients:,} + bf16 copies "
        f"{need.bf16_weights:,} + activations {need.activations:,} + head {need.head:,} B at {need.peak_at}",
    ]
    text += [
        f"  {name:<10} {job.count(name) if name in EVENTS else 1:>6,} x {found.costs.seconds[name]:,.2f} s"
        f"{' (measured)' if name in found.costs.measured else ''}"
        for name in ("start", "compile", *EVENTS)
        if found.costs.seconds[name]
    ]
    if found.loss is not None:
        formula = found.ladder.fit.law.formula if found.ladder else LOSS_FORMULA
        text.append(f"loss    = {formula} = {found.loss.value:.3f}")
    if found.cost is not None:
        text.append(
            f"cost    = ${found.cost.price_per_gpu_hour:g} x {on.world_size} x {found.seconds.value / 3600:.2f} h"
        )
    return text
