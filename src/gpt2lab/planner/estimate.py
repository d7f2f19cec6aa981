"""A run before it starts: time, memory, cost and loss, each with its interval and where it comes from. No torch.

The planner, the trainer's estimate.json, --fit_schedule and the deadline search all call `estimate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpt2lab.planner import communication, cost, memory
from gpt2lab.planner.cost import Cost
from gpt2lab.planner.events import EventCosts, event_costs
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.interval import Interval, total
from gpt2lab.planner.job import Job
from gpt2lab.planner.loss_prediction import predicted_loss
from gpt2lab.planner.machine import Machine
from gpt2lab.planner.memory import Memory
from gpt2lab.planner.timing import work

MEMORY_TARGET = 0.92  # of what a process may use; the rest is for what nobody foresaw
EVENTS = ("eval", "sample", "hellaswag", "checkpoint")


@dataclass(frozen=True)
class MemoryNeed:
    """What one process needs of its device."""

    tensors: Memory
    overhead: float  # fragmentation, driver context, NCCL; bytes
    available: float | None
    largest_micro_batch: (
        int | None
    )  # that fits; None if one sequence does not, or the memory is not known
    target: float

    @property
    def needed(self) -> float:
        """Bytes on the device."""
        return self.tensors.tensors + self.overhead

    @property
    def fits(self) -> bool | None:
        """Tell whether it fits the target share, None where the memory is not known."""
        return None if self.available is None else self.needed <= self.target * self.available


@dataclass(frozen=True)
class Estimate:
    """Everything that is foretold of one job on one machine."""

    job: Job
    machine: Machine
    step: Interval  # seconds
    throughput: Interval  # tokens/s of all processes
    sigma: float  # deviation of the logarithm of the step time
    communication_seconds: float  # if nothing hid it; 0 where it is part of measured steps
    memory: MemoryNeed
    costs: EventCosts
    breakdown: Mapping[str, Interval]  # seconds by part; `train` is the steps
    seconds: Interval
    cost: Cost | None
    loss: Interval | None  # None where no law speaks of it: see loss_prediction.py
    mfu: float | None

    @property
    def event_share(self) -> float:
        """Share of the whole time that is not steps."""
        return 1 - self.breakdown["train"].value / self.seconds.value


def loss_of_gpt2(job: Job) -> Interval | None:
    """Return the loss of a GPT-2 of as many parameters on as many tokens, trained with AdamW."""
    return predicted_loss(job.parameters, job.tokens, unique_tokens=job.unique_tokens)


def device_memory(job: Job, machine: Machine, hardware: Hardware, target: float) -> MemoryNeed:
    """Return what a process needs and the largest micro-batch that fits."""
    k = hardware.constants
    distributed = job.world > 1
    tensors = memory.predict(
        job.config.model,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        dtype=job.dtype,
        sharing=job.sharing,
        optimizer=job.config.optim.optimizer,
        tuning=job.config.tuning,
    )
    if machine.is_cpu:
        fixed, fragmentation = k["cpu_process_gib"] * 2**30, k["cpu_fragmentation"]
    else:
        fixed = (k["context_gib"] + (k["nccl_gib"] if distributed else 0.0)) * 2**30
        fragmentation = k["fragmentation"]
    largest = None
    if machine.memory_bytes is not None:
        budget = (target * machine.memory_bytes - fixed) / (1 + fragmentation)
        largest = memory.largest_micro_batch(
            job.config.model,
            sequences=job.sequences,
            budget=budget,
            dtype=job.dtype,
            sharing=job.sharing,
            optimizer=job.config.optim.optimizer,
            tuning=job.config.tuning,
        )
    overhead = fixed + fragmentation * tensors.tensors
    return MemoryNeed(tensors, overhead, machine.memory_bytes, largest, target)


def step_time(job: Job, machine: Machine) -> tuple[Interval, float, float]:
    """Return seconds of a step, its sigma, and what its communication would take if nothing hid it."""
    amount = job.work
    one = work(
        job.config.model, micro_batch=job.micro_batch, accumulation=1, recompute=job.recompute
    )
    micro = machine.rates.seconds((*one[:4], 0.0, one[5]))
    visible = communication.exposed(
        job.config.model,
        parallel=job.parallel,
        world=job.world,
        # What was learned from runs of as many processes holds what they waited for each other.
        link=None if machine.rates.observations else machine.link,
        accumulation=job.accumulation,
        micro_batch_seconds=micro,
    )
    extra = 0.0
    if job.world > 1 and machine.link is not None:
        extra = 0.02 if machine.link.is_nvlink else 0.08
    alone = machine.rates.interval(amount, extra_sigma=extra)
    value = alone.value + visible.seconds
    sigma = (machine.rates.sigma(amount) ** 2 + extra**2) ** 0.5
    return Interval.log_normal(value, sigma), sigma, visible.in_all


def estimate(
    job: Job,
    machine: Machine,
    hardware: Hardware,
    *,
    ratios: Mapping[str, float] | None = None,
    price: float | None = None,
    kwh: float | None = None,
    memory_target: float = MEMORY_TARGET,
) -> Estimate:
    """Foretell a job on a machine.

    `price`: US dollars for one GPU-hour instead of the list's; `kwh`: for owned hardware, the price of a kilowatt-hour.
    """
    step, sigma, in_all = step_time(job, machine)
    costs = event_costs(job, machine, hardware, ratios=ratios)
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
        communication_seconds=in_all,
        memory=device_memory(job, machine, hardware, memory_target),
        costs=costs,
        breakdown=breakdown,
        seconds=seconds,
        cost=cost.of_run(machine, seconds, price=price, kwh=kwh),
        loss=loss_of_gpt2(job) if job.is_gpt2 else None,
        mfu=None if not peak else throughput.value * job.flops_per_token / (peak * job.world),
    )
