"""An estimate for people: one screen."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from gpt2lab import fmt
from gpt2lab.model.counts import checkpoint_bytes
from gpt2lab.planner.deadline import Window, verdict
from gpt2lab.planner.estimate import EVENTS, Estimate, loss_of_gpt2
from gpt2lab.planner.interval import Z80, Interval

GIB = 2**30


def row(name: str, value: str, interval: str = "", note: str = "") -> str:
    """Write one line of the report."""
    return f"{name:<12} {value:<14} {interval:<21} {note}".rstrip()


def hours(interval: Interval) -> str:
    """Write the bounds of a time span."""
    return f"{fmt.duration(interval.low)} ... {fmt.duration(interval.high)}"


def title(estimate: Estimate) -> str:
    """Say what is trained on what."""
    job, T = estimate.job, estimate.job.config.model.context_length
    name = job.config.model.model
    return (
        f"{name} {fmt.count(job.parameters)}, T {T} | {fmt.count(job.tokens)} tokens = {job.max_steps:,} steps x "
        f"{job.config.batch.total_batch_size:,} | {estimate.machine.title} | {job.dtype}, "
        f"{'compiled' if job.compiled else 'not compiled'}"
    )


def source(estimate: Estimate) -> str:
    """Say where the speed comes from, and how far to trust it."""
    machine, spread = estimate.machine, math.exp(Z80 * estimate.sigma)
    text = {
        "roofline-prior": "roofline of data sheet and measured matmul, not calibrated",
        "cpu-matmul": "this CPU's matmul alone, UNCALIBRATED",
        "calibrated": "calibrated",
        "probe": "measured just now",
    }.get(machine.rates.source, machine.rates.source)
    note = f" ({machine.note})" if machine.note else ""
    hint = (
        "; --measure narrows it" if machine.rates.source in ("roofline-prior", "cpu-matmul") else ""
    )
    return f"{'source':<12} {text}{note}: 80 % interval x/÷ {spread:.2f}{hint}"


def describe(
    estimate: Estimate,
    *,
    now: float,
    window: Window | None = None,
    extra: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Write the whole estimate; `now` is when the run starts, Unix seconds."""
    lines = [title(estimate), source(estimate), *_speed(estimate), *_memory(estimate)]
    lines += [*_time(estimate, now), *_money(estimate), *_loss(estimate)]
    if window is not None:
        lines.append(_verdict(estimate, window))
    lines += [f"{'warning':<12} {warning}" for warning in warnings]
    return "\n".join([*lines, *extra])


def _speed(estimate: Estimate) -> list[str]:
    rate, step, job = estimate.throughput, estimate.step, estimate.job
    peak = estimate.machine.gpu.peak_flops if estimate.machine.gpu else None
    mfu = ""
    if estimate.mfu is not None and peak is not None:
        mfu = f"MFU {estimate.mfu:.0%} of {peak / 1e12:,.0f} TFLOP/s dense bf16 (6 N + 12 L C T)"
    cut = f"micro-batch {job.micro_batch} x accumulation {job.accumulation} x {job.world} process"
    cut += "es" if job.world > 1 else ""
    return [
        row(
            "throughput",
            f"{fmt.count(rate.value)} tok/s",
            f"{fmt.count(rate.low)} ... {fmt.count(rate.high)}",
            mfu,
        ),
        row("step", seconds(step.value), f"{seconds(step.low)} ... {seconds(step.high)}", cut),
    ]


def seconds(value: float) -> str:
    """Write a short time span."""
    return f"{value * 1000:,.0f} ms" if value < 10 else f"{value:,.1f} s"


def _memory(estimate: Estimate) -> list[str]:
    need, parts = estimate.memory, estimate.memory.tensors
    available = "" if need.available is None else f"of {need.available / GIB:.1f}"
    state = parts.params + parts.optimizer + parts.gradients
    pieces = [
        f"state {state / GIB:.1f}",
        f"activations {parts.activations / GIB:.1f}",
        f"head {parts.head / GIB:.1f}",
        f"bf16 copies {parts.bf16_weights / GIB:.1f}",
        f"overhead {need.overhead / GIB:.1f}",
    ]
    lines = [
        row("memory", f"{need.needed / GIB:.1f} GiB", available, ", ".join(pieces)),
        row(
            "",
            "",
            "",
            f"peak at {parts.peak_at}{', eager formula' if estimate.job.compiled else ''}",
        ),
    ]
    largest = need.largest_micro_batch
    if need.fits is False and largest is None:
        lines.append(row("", "DOES NOT FIT", "", "not even one sequence at a time"))
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
    finish = [
        time.strftime(form, time.localtime(now + end)) for end in (span.value, span.low, span.high)
    ]
    return [
        row("training", fmt.duration(parts["train"].value), hours(parts["train"])),
        row(
            "events",
            fmt.duration(events),
            f"{estimate.event_share:.0%} of the time",
            f"start, compile, {', '.join(counts)} of {each}",
        ),
        row(
            "TOTAL",
            fmt.duration(estimate.seconds.value),
            hours(estimate.seconds),
            f"finishes {finish[0]} ({finish[1]} ... {finish[2]})",
        ),
    ]


def _money(estimate: Estimate) -> list[str]:
    cost = estimate.cost
    if cost is None:
        return []
    dated = f", {cost.date}" if cost.date else ""
    energy = f"; about {cost.kwh:,.0f} kWh" if cost.kwh else ""
    return [
        row(
            "cost",
            dollars(cost.usd.value),
            f"{dollars(cost.usd.low)} ... {dollars(cost.usd.high)}",
            f"at ${cost.price_per_gpu_hour:g} per GPU-hour ({cost.source}{dated}; --price){energy}",
        )
    ]


def dollars(value: float) -> str:
    """Write an amount of money."""
    return f"${value:,.0f}" if value >= 10 else f"${value:.2f}"


def _loss(estimate: Estimate) -> list[str]:
    job = estimate.job
    loss, ratio = loss_of_gpt2(job), f"{job.tokens / job.parameters:.0f} tokens a parameter"
    if not job.is_gpt2:
        said = "" if loss is None else f", and says {loss.low:.2f} ... {loss.high:.2f} of that"
        return [row("loss", "n/a", "", f"the law is of GPT-2 with AdamW{said}; {ratio}")]
    if loss is None:
        return [row("loss", "n/a", "", f"the scaling law begins at 40M parameters; {ratio}")]
    return [
        row(
            "loss",
            f"{loss.value:.2f}",
            f"{loss.low:.2f} ... {loss.high:.2f}",
            f"FineWeb validation, to rank sizes, not a promise; {ratio}",
        )
    ]


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
    return row("window", judged.upper().replace("_", " "), budget, meaning)
