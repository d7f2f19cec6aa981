"""A run before it starts: time, memory, cost and loss, each with its interval and its source. No torch.

The planner's reports, the trainer's estimate.json, --fit_schedule and the search for what fits a window all call
`estimate`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt2lab import fmt
from gpt2lab.config.derived import CPU_COMPILE_FROM_STEPS, compiles, saves_in_background
from gpt2lab.files import read_regular
from gpt2lab.model.counts import checkpoint_bytes, count_matmul_parameters
from gpt2lab.planner import communication
from gpt2lab.planner.hardware import Hardware, day_of
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Machine
from gpt2lab.planner.memory import Memory
from gpt2lab.planner.timing import work
from gpt2lab.training.progress import Interval, total

if TYPE_CHECKING:
    from gpt2lab.planner.ladder import Ladder

MEMORY_TARGET = 0.92  # of what a rank may use; the rest is for what the formula leaves out
EVENTS = ("eval", "sample", "hellaswag", "checkpoint")


@dataclass(frozen=True)
class Estimate:
    """Everything that is predicted of one job on one machine."""

    job: Job
    machine: Machine
    step: Interval  # seconds
    throughput: Interval  # tokens/s of all ranks
    sigma: float  # deviation of the logarithm of the step time
    communication_seconds: float  # if nothing hid it; 0 where measured steps contain it
    memory: MemoryNeed
    costs: EventCosts
    breakdown: Mapping[str, Interval]  # seconds by part; `train` is the steps
    seconds: Interval
    cost: Cost | None
    loss: Interval | None  # None where the scaling law does not apply
    mfu: float | None
    ladder: Ladder | None = None  # that the loss is from, else the public law

    @property
    def event_share(self) -> float:
        """Share of the total time that is not steps."""
        return 1 - self.breakdown["train"].value / self.seconds.value

    def describe_time(self) -> str:
        """Write the time of the run with its interval, and where it is from."""
        span = self.seconds
        value, low, high = (fmt.duration(time) for time in (span.value, span.low, span.high))
        return f"{value} ({low} ... {high}, 80 %), from {self.machine.rates.source}"


def estimate(
    job: Job,
    machine: Machine,
    hardware: Hardware,
    *,
    price: float | None = None,
    memory_target: float = MEMORY_TARGET,
) -> Estimate:
    """Predict a job on a machine; `price`: US dollars for one GPU-hour instead of the listed price."""
    step, sigma, unhidden = step_time(job, machine)
    costs = event_costs(job, machine, hardware)
    breakdown = {
        "start": costs.interval("start", 1),
        "compile": costs.interval("compile", 1 if job.compiled else 0),
        "train": step.scaled(job.max_steps),
        **{kind: costs.interval(kind, job.count(kind)) for kind in EVENTS},
    }
    seconds = total(list(breakdown.values()))
    throughput = step.inverse_of(job.config.batch.total_batch_size)
    peak = machine.gpu.peak_flops if machine.gpu else None
    return Estimate(
        job=job,
        machine=machine,
        step=step,
        throughput=throughput,
        sigma=sigma,
        communication_seconds=unhidden,
        memory=device_memory(
            job, hardware, memory_target, is_cpu=machine.is_cpu, available=machine.memory_bytes
        ),
        costs=costs,
        breakdown=breakdown,
        seconds=seconds,
        cost=cost_of_run(machine, seconds, price=price),
        loss=loss_of(job) if job.is_gpt2 else None,
        mfu=None if not peak else throughput.value * job.flops_per_token / (peak * job.world_size),
    )


def step_time(job: Job, machine: Machine) -> tuple[Interval, float, float]:
    """Return seconds of a step, its sigma, and the seconds of its communication if nothing hid it."""
    amount = job.work
    # Rates learned from runs at this world size contain the communication.
    link = None if machine.rates.observations else machine.link
    once = _micro_batch_seconds(job, machine, recomputes=True)
    visible, unhidden = communication.exposed(job, link, once)
    extra = 0.0
    if job.world_size > 1 and machine.link is not None:
        extra = 0.02 if machine.link.is_nvlink else 0.08
    value = machine.rates.seconds(amount) + visible
    sigma = (machine.rates.sigma(amount) ** 2 + extra**2) ** 0.5
    return Interval.log_normal(value, sigma), sigma, unhidden


def _micro_batch_seconds(job: Job, machine: Machine, *, recomputes: bool) -> float:
    """Return the seconds of one micro-batch, without the update."""
    one = work(
        job.config.model,
        micro_batch=job.micro_batch,
        accumulation=1,
        recompute=job.recompute if recomputes else "none",
    )
    return machine.rates.seconds((*one[:4], 0.0, *one[5:]))


# -- memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryNeed:
    """What one rank needs of its device."""

    tensors: Memory
    overhead: float  # fragmentation, driver context, NCCL; bytes
    available: float | None
    largest_micro_batch: int | None  # that fits; None if not even one, or memory is unknown
    target: float

    @property
    def needed(self) -> float:
        """Bytes on the device."""
        return self.tensors.tensors + self.overhead

    @property
    def fits(self) -> bool | None:
        """Tell whether it fits the target share, None where the memory is not known."""
        return None if self.available is None else self.needed <= self.target * self.available


def device_memory(
    job: Job, hardware: Hardware, target: float, *, is_cpu: bool, available: float | None
) -> MemoryNeed:
    """Return what a rank needs and the largest micro-batch that fits into the `available` bytes."""
    k, tensors = hardware.constants, job.memory(on_gpu=not is_cpu)
    fragmentation = "fragmentation_compiled" if job.compiled else "fragmentation"
    if is_cpu:  # keeps freed memory (Runtime), which uncompiled steps cut up
        fixed, share = k["cpu_process_gib"] * 2**30, k[f"cpu_{fragmentation}"]
    else:
        fixed = (k["context_gib"] + (k["nccl_gib"] if job.world_size > 1 else 0.0)) * 2**30
        share = k[fragmentation]
    largest = None
    if available is not None:
        budget = (target * available - fixed) / (1 + share)
        largest = job.largest_micro_batch(budget, on_gpu=not is_cpu)
    overhead = fixed + share * tensors.tensors
    return MemoryNeed(tensors, overhead, available, largest, target)


# -- events ------------------------------------------------------------------------------------------------------

_REGIONS_AS_LAYERS = 2  # of one graph that compile for as long, at any depth (docs/gpu_results.md)
HELLASWAG_ITEMS = 10_042
# Of an item in one of its two texts, its context once: the mean of 200 items.
HELLASWAG_TOKENS = 155
# Uncertainty of an event's cost, as the deviation of its logarithm.
GUESS, MEASURED = 0.5, 0.1


@dataclass(frozen=True)
class EventCosts:
    """Seconds of one event of each kind; those in `measured` were timed on this machine."""

    seconds: Mapping[str, float]
    measured: frozenset[str]

    def interval(self, kind: str, count: float) -> Interval:
        """Return what `count` events cost."""
        sigma = MEASURED if kind in self.measured else GUESS
        return Interval.log_normal(max(self.seconds.get(kind, 0.0) * count, 1e-9), sigma)


@functools.cache
def _count_items(path: Path | None) -> int:
    """Count the lines of a run's HellaSwag; as many as are published if it is not here yet."""
    if path is not None:
        with contextlib.suppress(OSError):
            return max(1, read_regular(path, at_most=1 << 30, follow=True).count(b"\n"))
    return HELLASWAG_ITEMS


def event_costs(job: Job, machine: Machine, hardware: Hardware) -> EventCosts:
    """Return the cost of start, compilation, evaluations, samples and checkpoints.

    `machine.ratios` come from its runs (calibration.py): eval: seconds of evaluating a token relative to training on
    it; hellaswag: the same of one item in one text; checkpoint: bytes a second; compile, start: seconds.
    """
    known, k = machine.ratios, hardware.constants
    model, evals = job.config.model, job.config.eval
    training_token = _micro_batch_seconds(job, machine, recomputes=False) / (
        job.micro_batch * model.context_length
    )
    uncompiled = training_token / 3 * (k["eager_eval_factor"] if job.compiled else 1.0)
    # As Strategy.compiles_evaluation; HellaSwag always runs uncompiled.
    forward = uncompiled if machine.is_cpu or job.compiles_by_region else training_token / 3
    forward = training_token * known["eval"] if "eval" in known else forward
    least = model.n_layer * k["sample_seconds_per_layer"]
    sampled_token = max(
        # Short rows multiply slowly: 16 times a large product's seconds.
        2 * count_matmul_parameters(model) * machine.rates.seconds_per_unit[0] * 16,
        least,
    )
    items = _count_items(evals.hellaswag_path)
    items = min(evals.hellaswag_limit or items, items)
    texts = 2 if evals.hellaswag_metrics == "all" else 1
    hellaswag_item = texts * max(HELLASWAG_TOKENS * uncompiled, least)
    if "hellaswag" in known:
        hellaswag_item = texts * (training_token * known["hellaswag"])
    compile_seconds = k["compile_seconds_cpu"]
    if not machine.is_cpu:
        layers = _REGIONS_AS_LAYERS if job.compiles_by_region else model.n_layer
        compile_seconds = k["compile_seconds"] + k["compile_seconds_per_layer"] * layers
        if not job.compiles_by_region and job.count("eval"):  # as Strategy.compiles_evaluation
            compile_seconds *= 1 + k["compile_evaluation"]
    seconds = {
        "eval": evals.val_tokens / job.world_size * forward,
        "sample": evals.sample_tokens * sampled_token,
        "hellaswag": items / job.world_size * hellaswag_item,
        "checkpoint": _seconds_of_a_save(job, machine, k),
        "compile": known.get("compile", compile_seconds) if job.compiled else 0.0,
        "start": known.get("start", k["start_seconds"]),
    }
    return EventCosts(seconds, frozenset(known))


def _seconds_of_a_save(job: Job, machine: Machine, k: Mapping[str, float]) -> float:
    """Return the mean seconds for which training waits: where a thread writes, for copies and the last save."""
    size, saves = checkpoint_bytes(job.config), job.count("checkpoint")
    if rate := machine.ratios.get("checkpoint"):
        return size / rate
    written = size / k["checkpoint_bytes_per_second"]
    if saves == 0 or not saves_in_background(job.config.checkpoint, on_gpu=not machine.is_cpu):
        return written
    return (written + (saves - 1) * size / k["checkpoint_copy_bytes_per_second"]) / saves


# -- cost --------------------------------------------------------------------------------------------------------

_OLD_AFTER_DAYS = 180


@dataclass(frozen=True)
class Cost:
    """US dollars of a run: price times cards times hours. A price is a convention with a date, never a fact."""

    usd: Interval
    price_per_gpu_hour: float
    source: str
    date: str | None
    energy_kwh: float | None  # where the cards' power is known

    def is_old(self, today: datetime.date) -> bool:
        """Tell whether the price is older than half a year."""
        return self.date is not None and (today - day_of(self.date)).days > _OLD_AFTER_DAYS


def cost_of_run(machine: Machine, seconds: Interval, *, price: float | None) -> Cost | None:
    """Return the cost of a run, or None where there is no price."""
    gpu = machine.gpu
    energy = None
    if gpu is not None and gpu.watts is not None:
        energy = gpu.watts * machine.world_size * seconds.value / 3.6e6
    if price is not None:
        hourly, source, date = price, "--price", None
    elif gpu is not None and gpu.usd_per_hour is not None:
        hourly, source, date = gpu.usd_per_hour, gpu.price_source or "", gpu.price_date
    else:
        return None
    usd = seconds.scaled(hourly * machine.world_size / 3600)
    return Cost(usd, hourly, source, date, energy)


# -- loss --------------------------------------------------------------------------------------------------------

# L = E + A / N^ALPHA + B / D'^BETA with the constants that Besiroglu et al. 2024 (arXiv:2404.10102) refitted to
# Hoffmann et al. Repeated data count for less: D' = U + 15.39 U (1 - e^(-(D/U - 1) / 15.39)), Muennighoff et al. 2023
# (arXiv:2305.16264). For GPT-2 on FineWeb the law is too low: it says 3.01 for 124M on 10.26B tokens where llm.c's
# public log ends at 3.272. The offset adds the difference; it moves with data and recipe, hence the band. It is for
# ranking sizes. It holds for GPT-2's blocks and AdamW alone: for others no offset is known.
LAW = "besiroglu2024+offset"
_E, _A, _B, _ALPHA, _BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
_FINEWEB_OFFSET = 0.27  # 3.272 (llm.c, 124M, 10.26B tokens of FineWeb) - 3.01
_REPEAT = 15.3878
_BAND = 0.10
_SMALLEST = 40e6  # parameters: the law was fitted from 44M up
LOSS_FORMULA = (
    f"{_E} + {_A}/N^{_ALPHA} + {_B}/D^{_BETA} (arXiv:2404.10102) + {_FINEWEB_OFFSET} (FineWeb)"
)


def effective_tokens(tokens: float, unique_tokens: float | None) -> float:
    """Return how many unique tokens are worth as much as `tokens`, of which only `unique_tokens` differ."""
    if unique_tokens is None or tokens <= unique_tokens:
        return tokens
    repeats = tokens / unique_tokens - 1
    return unique_tokens * (1 + _REPEAT * (1 - math.exp(-repeats / _REPEAT)))


def loss_of(job: Job) -> Interval | None:
    """Return the predicted loss of a job; repeated tokens of a mixture are discounted source by source."""
    tokens = sum(effective_tokens(*part) for part in job.tokens_by_source)
    return predicted_loss(job.parameters, tokens)


def predicted_loss(parameters: int, tokens: float) -> Interval | None:
    """Return nats/token of a GPT-2 trained with AdamW on FineWeb, or None where the law does not apply."""
    if parameters < _SMALLEST or tokens < 1:
        return None
    value = _E + _A / parameters**_ALPHA + _B / tokens**_BETA + _FINEWEB_OFFSET
    return Interval(value, value - _BAND, value + _BAND)


# -- windows -----------------------------------------------------------------------------------------------------

Verdict = Literal["fits", "borderline", "does_not_fit"]


@dataclass(frozen=True)
class Window:
    """Seconds from start to deadline, and how many of them stay free."""

    seconds: float
    margin: float

    @property
    def budget(self) -> float:
        """Seconds that may be used."""
        return self.seconds - self.margin


def verdict(estimate: Estimate, window: Window) -> Verdict:
    """Judge a run: `fits` if even the upper bound does, `borderline` if only the middle does."""
    if estimate.memory.fits is False or estimate.seconds.value > window.budget:
        return "does_not_fit"
    return "fits" if estimate.seconds.high <= window.budget else "borderline"


def steps_that_fit(
    job: Job, window: Window, predict: Callable[[Job], Estimate], *, at_most: int = 10**9
) -> int:
    """Return the largest number of steps whose upper bound is within the budget, 0 if not even one is."""
    return bisect.bisect_left(
        range(1, at_most + 1),
        True,
        key=lambda steps: predict(job.with_steps(steps)).seconds.high > window.budget,
    )


def longest_that_fits(
    job: Job, window: Window, predict: Callable[[Job], Estimate], *, at_most: int = 10**9
) -> Job | None:
    """Return the job at the largest length that fits, None if not even a step does; few steps of a CPU uncompiled."""
    steps = steps_that_fit(job, window, predict, at_most=at_most)
    on_gpu = not predict(job).machine.is_cpu
    if job.compiled and not compiles(job.config.system, on_gpu=on_gpu, max_steps=steps):
        plain, at_most = dataclasses.replace(job, compiled=False), CPU_COMPILE_FROM_STEPS - 1
        return longest_that_fits(plain, window, predict, at_most=at_most)
    return job.with_steps(steps) if steps else None
