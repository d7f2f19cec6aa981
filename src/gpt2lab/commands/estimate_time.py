"""Predict a run before it starts: time, memory, cost, loss; or tell how long the newest run still takes.

gpt2lab estimate
gpt2lab estimate --gpu H100 --gpus 8 --model gpt2 --tokens 10B
gpt2lab estimate --measure --deadline 12h
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from typing import Any

from gpt2lab import fmt
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.request import default_warmup
from gpt2lab.errors import ConfigError, system_errors_as
from gpt2lab.files import replace_durably
from gpt2lab.planner import alternatives, forecast, hardware, machine, measuring, remaining, reports
from gpt2lab.planner.auto import fitting_flag
from gpt2lab.planner.estimate import Estimate, verdict
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.request import EstimateRequest, Predictor, check_request, start_of, window_of
from gpt2lab.runs.target import find_run
from gpt2lab.training.plan import find_repeats

DOES_NOT_FIT = 3
_COMMON = (  # flags of the short help
    *("run_name", "model", "gpu", "gpus", "tokens", "steps", "epochs", "data_dir", "deadline"),
    *("mini_batch_size", "measure", "compare", "explain", "list_gpus", "json", "checkpoint_dir"),
)
_EVENT_SHARE = 0.05  # of the time, from which a hint names a longer evaluation interval
_WANTED_SHARE = 0.02  # of the time that evaluations take with it


def main(argv: list[str]) -> int:
    """Print one report, or one JSON object, and return the exit code: 0, or 3 if the run does not fit.

    Raises: GPT2LabError with its exit code.
    """
    request = parse_flags(EstimateRequest, argv, about=__doc__, common=_COMMON)
    document, text, code = find_answer(request)
    print(json.dumps(document, allow_nan=False) if request.json else text)
    return code


def find_answer(request: EstimateRequest) -> tuple[dict[str, Any], str, int]:
    """Return the answer as JSON and as text, and the exit code; write the file of --report durably.

    Raises: GPT2LabError with its exit code.
    """
    check_request(request)
    document, text, code = _find_answer(request, hardware.load())
    if request.report is not None:
        with system_errors_as(ConfigError, f"--report {request.report}", what="cannot write there"):
            replace_durably(request.report, json.dumps(document, indent=1) + "\n")
    return document, text, code


def _find_answer(request: EstimateRequest, known: Hardware) -> tuple[dict[str, Any], str, int]:
    if request.list_gpus:
        return *_describe_hardware(known), 0
    if request.accuracy:
        return *forecast.describe_history(request.folder()), 0
    if not request.names_a_job:
        run_dir = remaining.last_written_run(request.folder())
        if request.run_name is not None:
            run_dir = find_run(request.run_name, request.checkpoint_dir)
        if run_dir is not None:
            now, left = time.time(), remaining.estimate_remaining(run_dir)
            document = remaining.remaining_as_json(left, now)
            return document, remaining.describe_remaining(left, now), 0
    if request.compare is None:
        return _describe_job(request, known)
    window, predictor = window_of(request, time.time()), Predictor(request, known)
    if request.measure or request.find_batch_size:
        predictor = Predictor(measuring.measure(request, predictor)[0], known)
    lowers = request.mini_batch_size is None
    return alternatives.describe_comparison(predictor, request.compare, window, lowers=lowers)


def _describe_job(request: EstimateRequest, known: Hardware) -> tuple[dict[str, Any], str, int]:
    predictor = Predictor(request, known)
    now = time.time()
    begins, window = start_of(request, now), window_of(request, now)
    batch_search, advice = None, None
    if request.measure or request.find_batch_size:
        request, batch_search = measuring.measure(request, predictor)
        predictor = Predictor(request, known)
    lowers = request.mini_batch_size is None
    found = alternatives.fit_memory(predictor, predictor.job(), lowers=lowers)
    job, warnings = found.job, _warnings(found)
    if predictor.unseen:
        warnings.insert(0, f"predicted for the processor: {predictor.unseen}")
    rows = alternatives.scaling(predictor, found, request.scaling)
    judged = verdict(found, window) if window else None
    # A micro-batch that nobody typed was replaced by one that fits.
    too_large = found.memory.fits is False
    options: list[str] = []
    if too_large and found.memory.largest_micro_batch is None:
        options = alternatives.where_it_fits(found, known)
    elif window and judged != "fits":
        options = alternatives.what_fits(predictor, found, window)
    extra = ["", alternatives.scaling_table(rows)] if len(rows) > 1 else []
    extra += ["", "to make it fit", *(f"  {line}" for line in options)] if options else []
    extra += ["", *reports.formulas(found, known)] if request.explain else []
    if job.unique_tokens is not None:
        listed = known.profiles.values()
        advice = hardware.advise_profile(job.unique_tokens, parameters=job.parameters, known=listed)
        extra += [f"{'data':<12} {advice}"]
    rates = alternatives.learning_rates(job.config, None if request.steps else job.tokens)
    extra.append(alternatives.learning_rate_line(rates, job.config, request))
    batch = job.config.batch.total_batch_size
    steps = dict.fromkeys(round(share * job.max_steps) for share in remaining.MILESTONES)
    milestones = [
        remaining.milestone(
            at, found.seconds.scaled(at / job.max_steps), tokens=at * batch, now=begins
        )
        for at in steps
        if at > 0
    ]
    document = reports.estimate_as_json(
        found,
        predictor.profile.name,
        window=window,
        scaling=rows,
        milestones=milestones,
        warnings=warnings,
    )
    document |= {"data_advice": advice, "batch_search": batch_search, "learning_rate": rates}
    text = reports.describe_estimate(
        found, now=begins, window=window, extra=extra, warnings=warnings
    )
    does_not_fit = judged in ("borderline", "does_not_fit") or too_large
    return document, text, DOES_NOT_FIT if does_not_fit else 0


def _warnings(found: Estimate) -> list[str]:
    """Name settings that can run but do not make sense together, and what makes the estimate doubtful."""
    job, config, steps = found.job, found.job.config, found.job.max_steps
    warnings = []
    warmup, eval_freq = config.optim.warmup_steps, config.eval.eval_freq
    if warmup is not None and warmup >= steps:
        warnings.append(
            f"warm-up of {warmup:,} steps in a run of {steps:,}: the rate never decays; "
            f"try {default_warmup(steps):,}"
        )
    checkpoint_freq = config.checkpoint.checkpoint_freq
    for name, freq in (("eval_freq", eval_freq), ("checkpoint_freq", checkpoint_freq)):
        if freq > steps:
            warnings.append(
                f"{name} {freq:,} is longer than the run of {steps:,} steps: it happens only at the end"
            )
    warnings += find_repeats(job.epochs_by_source or {"the data": job.epochs or 0.0})
    evals, total = found.breakdown["eval"].value, found.seconds.value
    if found.event_share > _EVENT_SHARE and evals > 2 * _WANTED_SHARE * total:
        wanted = (eval_freq or steps) * evals / (_WANTED_SHARE * (total - evals))
        better = -(-round(wanted) // 50) * 50
        share = f"{evals / total:.0%}"
        warnings.append(
            f"evaluations take {share} of the time; --eval_freq {better} makes it 2 %"
            if better <= steps  # the one before the first step and the last one stay
            else f"evaluations take {share} of the time; a smaller --val_tokens makes it less"
        )
    if found.memory.fits is False and (flag := fitting_flag(found.memory)):
        warnings.append(f"mini_batch_size {job.micro_batch} does not fit; {flag} does")
    if found.cost is not None and found.cost.is_old(datetime.date.today()):
        warnings.append(
            f"the price of {found.cost.date} is more than half a year old; give --price"
        )
    if found.machine.is_cpu and job.world_size == 1 and (busy := machine.describe_load()):
        warnings.append(busy)
    return warnings


def _describe_hardware(known: Hardware) -> tuple[dict[str, Any], str]:
    everything = dataclasses.asdict(known)
    document = {name: everything[name] for name in ("version", "gpus", "links", "sources")}

    def number(value: float | None, unit: float, places: int = 0) -> str:
        return "n/a" if value is None else f"{value / unit:,.{places}f}"

    rows = [
        [
            gpu.name,
            number(gpu.peak_flops, 1e12),
            number(gpu.matmul_flops, 1e12),
            number(gpu.memory_bytes, 2**30, 1),
            number(gpu.bandwidth, 1e9),
            gpu.link or "n/a",
            number(gpu.usd_per_hour, 1, 2),
            gpu.price_date or "",
            gpu.note or "",
        ]
        for gpu in known.gpus.values()
    ]
    header = [
        "card",
        "bf16/fp16 TFLOP/s",
        "best matmul",
        "GiB",
        "GB/s",
        "link",
        "$/h",
        "price of",
        "",
    ]
    cards = fmt.table(header, rows)
    links = known.links.values()
    rows = [[link.name, number(link.rate(2**25), 1e9, 1), link.title] for link in links]
    networks = fmt.table(["interconnect", "GB/s at 32 MiB", ""], rows)
    source = f"hardware.json version {known.version}; it names the source of every number"
    return document, f"{cards}\n\n{networks}\n\n{source}"
