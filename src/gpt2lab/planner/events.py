"""What a run does besides steps, in seconds: start, compilation, evaluations, samples, checkpoints. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpt2lab.model.counts import checkpoint_bytes, count_matmul_parameters
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.interval import Interval
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Machine
from gpt2lab.planner.timing import work

HELLASWAG_ITEMS = 10_042
HELLASWAG_TOKENS = (
    155  # of one item in one of the two texts, its context once: the mean of 200 items
)
# How far each may be off before it was measured, as the deviation of its logarithm.
GUESS, MEASURED = 0.5, 0.1


@dataclass(frozen=True)
class EventCosts:
    """Seconds of one event of each kind; those in `measured` were seen on this machine."""

    seconds: Mapping[str, float]
    measured: frozenset[str]

    def interval(self, kind: str, count: float) -> Interval:
        """Return what `count` events cost."""
        sigma = MEASURED if kind in self.measured else GUESS
        return Interval.log_normal(max(self.seconds.get(kind, 0.0) * count, 1e-9), sigma)


def event_costs(
    job: Job, machine: Machine, hardware: Hardware, *, ratios: Mapping[str, float] | None = None
) -> EventCosts:
    """Return the cost of each kind of event.

    `ratios` come from runs of this machine (calibration.py): eval: seconds of evaluating a token relative to training
    on it; hellaswag: the same of one item in one text; checkpoint: bytes a second; sample: relative to reading all
    weights once a token; compile, start: seconds.
    """
    known, k = dict(ratios or {}), hardware.constants
    model, rates = job.config.model, machine.rates
    one = work(model, micro_batch=job.micro_batch, accumulation=1)
    training_token = rates.seconds((*one[:4], 0.0, one[5])) / (
        job.micro_batch * model.context_length
    )
    forward = training_token / 3 * (k["eager_factor"] if job.compiled else 1.0)
    forward = training_token * known["eval"] if "eval" in known else forward
    val_tokens = job.config.eval.val_tokens / job.world
    token_by_token = job.config.eval.sample_tokens * max(
        2
        * count_matmul_parameters(model)
        * rates.seconds_per_unit[0]
        * 16,  # short rows multiply slowly
        model.n_layer * k["sample_seconds_per_layer"],
    )
    items = job.config.eval.hellaswag_limit or HELLASWAG_ITEMS
    texts = 2 if job.config.eval.hellaswag_metrics == "all" else 1
    hellaswag_item = texts * (
        training_token * known["hellaswag"]
        if "hellaswag" in known
        else max(HELLASWAG_TOKENS * forward, model.n_layer * k["sample_seconds_per_layer"])
    )
    seconds = {
        "eval": val_tokens * forward,
        "sample": token_by_token * known.get("sample", 1.0),
        "hellaswag": items / job.world * hellaswag_item,
        "checkpoint": checkpoint_bytes(job.config)
        / known.get("checkpoint", k["checkpoint_bytes_per_second"]),
        "compile": known.get("compile", k["compile_seconds"]) if job.compiled else 0.0,
        "start": known.get("start", k["start_seconds"]),
    }
    if machine.is_cpu and "compile" not in known and job.compiled:
        seconds["compile"] = k["compile_seconds_cpu"]
    return EventCosts(seconds, frozenset(known))
