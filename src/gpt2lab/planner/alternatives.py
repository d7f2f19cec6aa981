"""Alternatives to a run: tables of cards, models, profiles and world sizes; what fits instead; learning rates."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from gpt2lab import fmt
from gpt2lab.config.presets import for_length, preset
from gpt2lab.config.schema import Config, ModelName
from gpt2lab.config.settings import override
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.planner import reports
from gpt2lab.planner.estimate import Estimate, Window, device_memory, longest_that_fits, verdict
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.job import Job, fit_mini_batch
from gpt2lab.planner.machine import Machine, named
from gpt2lab.planner.reports import GIB, dollars, hours, seconds
from gpt2lab.planner.request import LENGTHS, Comparison, EstimateRequest, Predictor

_CARDS_SHOWN = 4  # of those that a model fits, the smallest
MODELS: tuple[ModelName, ...] = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def scaling(predictor: Predictor, found: Estimate, world_sizes: str) -> list[dict[str, Any]]:
    """Return one row for each world size of --scaling, at a fixed number of tokens a step.

    Raises: ConfigError if --scaling is not a list of numbers.
    """
    request, job = predictor.request, found.job
    if predictor.gpu is None:
        return []
    if not re.fullmatch(r"[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", world_sizes):
        raise ConfigError(f"--scaling {world_sizes!r} is not a list like 1,2,4,8")
    counts = sorted({*map(int, world_sizes.split(",")), job.world_size})
    rows, one = [], None
    for count in counts:
        # A node holds as many cards as in the job.
        nodes = -(-count * request.nodes // job.world_size) if request.nodes > 1 else 1
        link = request.interconnect if nodes > 1 or request.nodes == 1 else None
        where: dict[str, Any] = {"compiled": job.compiled, "nodes": nodes, "interconnect": link}
        try:
            on = named(predictor.gpu, predictor.hardware, gpus=count, **where)
            config = fit_mini_batch(job.config, count, typed=False)
        except ConfigError:  # so many cannot share the batch, or no link between them is known
            continue
        alike = dataclasses.replace(job, config=config, world_size=count)
        there = fit_memory(predictor, alike, on=on, lowers=request.mini_batch_size is None)
        one = there.step.value if count == 1 else one
        rows.append(
            {
                "gpus": count,
                "step_seconds": there.step.value,
                "hours": there.seconds.value / 3600,
                "efficiency": one / (count * there.step.value) if one else None,
                "usd": there.cost.usd.value if there.cost else None,
                "fits_memory": there.memory.fits,
            }
        )
    return rows


def scaling_table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the scaling rows."""
    cells = [
        [
            str(row["gpus"]),
            seconds(row["step_seconds"]),
            fmt.duration(3600 * row["hours"]),
            fmt.number(row["efficiency"], ".1%"),
            "n/a" if row["usd"] is None else dollars(row["usd"]),
            "no memory" if row["fits_memory"] is False else "",
        ]
        for row in rows
    ]
    return fmt.table(["GPUs", "step", "total", "efficiency*", "cost", ""], cells) + (
        "\n* of the steps alone; startup and events do not get shorter"
    )


def describe_comparison(
    predictor: Predictor, what: Comparison, window: Window | None, *, lowers: bool
) -> tuple[dict[str, Any], str, int]:
    """Return one table as JSON and as text, and the exit code: 0, or 3 if nothing in it fits window and memory.

    `lowers`: replace a micro-batch that does not fit.

    Raises: GPT2LabError, the first one, if nothing could be estimated.
    """
    rows = _rows(predictor, what, window, lowers=lowers)
    fits = [r for r in rows if r["verdict"] in (None, "fits") and r["fits_memory"] is not False]
    document = reports.blank_report() | {"comparison": {"by": what, "rows": rows}}
    document |= {"max_training_hours": window.seconds / 3600 if window else None}
    document["profile_name"] = predictor.profile.name
    document["model"] = rows[0]["model_counts"] if what == "gpus" else None
    is_search = what == "models" and window is not None
    known = [row for row in fits if row["loss"] is not None]
    best = min(known, key=lambda row: float(row["loss"]), default=None)
    cells = [_cells(row, is_best=is_search and row is best) for row in rows]
    header = [what[:-1], *("tokens", "tok/param", "time", "80 %", "cost", "$/B tok")]
    lines = [fmt.table([*header, "loss", "verdict"], cells)]
    if window:
        how = "the upper bound decides"
        if what != "gpus" and not _gives_length(predictor.request):
            how = "tokens chosen so that the upper bound fits"
        window_text = f"{fmt.duration(window.seconds)} less {fmt.duration(window.margin)}"
        lines.append(f"window {window_text}; {how}")
    if is_search and best is not None:
        lines.append("* lowest predicted loss; differences below 0.10 are within its uncertainty")
    return document, "\n".join(lines), 0 if fits else 3


def _cells(row: dict[str, Any], *, is_best: bool) -> list[str]:
    return [
        row["name"] + (" *" if is_best else ""),
        fmt.count(row["tokens"]),
        f"{row['tokens_per_parameter']:.0f}",
        fmt.duration(3600 * row["hours"]),
        f"{fmt.duration(3600 * row['low_hours'])} ... {fmt.duration(3600 * row['high_hours'])}",
        "n/a" if row["usd"] is None else dollars(row["usd"]),
        "n/a" if row["usd"] is None else dollars(row["usd"] / row["tokens"] * 1e9),
        fmt.number(row["loss"], ".2f"),
        "no memory"
        if row["fits_memory"] is False
        else {"does_not_fit": "no", None: ""}.get(row["verdict"], row["verdict"]),
    ]


def _gives_length(request: EstimateRequest) -> bool:
    return any(getattr(request, length) is not None for length in LENGTHS)


def _rows(
    predictor: Predictor, what: Comparison, window: Window | None, *, lowers: bool
) -> list[dict[str, Any]]:
    """Return a row for each alternative that can be estimated; cards as many as asked for, fastest first.

    Models and profiles train on as many tokens as fit the window, unless the length was asked for.
    """
    request, known = predictor.request, predictor.hardware
    others: dict[str, dict[str, Any]]
    if what == "gpus":
        others = {gpu: {"gpu": gpu, "gpus": request.gpus or 1} for gpu in known.gpus}
    elif what == "models":
        others = {model: {"model": model} for model in MODELS}
    else:
        others = {name: {"profile": name} for name in known.profiles}
    given = _gives_length(request)
    skipped = ConfigError if what == "gpus" else GPT2LabError
    rows, errors = [], []
    for name, other in others.items():
        there = Predictor(dataclasses.replace(request, **other), known)
        try:
            found = fit_memory(there, there.job(), lowers=lowers)
        except skipped as error:
            errors.append(error)
            continue
        if what != "gpus" and window and not given and found.memory.fits is not False:
            found = _longest(there, found, window) or found
        rows.append(_row(found.machine.title if what == "gpus" else name, found, window))
    if not rows:
        raise errors[0]
    return sorted(rows, key=lambda row: float(row["hours"])) if what == "gpus" else rows


def _row(name: str, found: Estimate, window: Window | None) -> dict[str, Any]:
    job = found.job
    return {
        "name": name,
        "tokens": job.tokens,
        "tokens_per_parameter": job.tokens / job.parameters,
        "epochs": job.epochs,
        "hours": found.seconds.value / 3600,
        "low_hours": found.seconds.low / 3600,
        "high_hours": found.seconds.high / 3600,
        "usd": found.cost.usd.value if found.cost else None,
        "loss": found.loss.value if found.loss else None,
        "micro_batch": job.micro_batch,
        "fits_memory": found.memory.fits,
        "verdict": verdict(found, window) if window else None,
        "model_counts": {"parameters": job.parameters, "flops_per_token": job.flops_per_token},
    }


def fit_memory(
    predictor: Predictor, job: Job, *, lowers: bool, on: Machine | None = None
) -> Estimate:
    """Estimate the job; with `lowers`, a micro-batch that does not fit is replaced by the largest that does."""
    found = predictor.predict(job, on=on)
    largest = found.memory.largest_micro_batch if lowers and found.memory.fits is False else None
    return predictor.predict(job.with_micro_batch(largest), on=on) if largest else found


def _longest(predictor: Predictor, found: Estimate, window: Window) -> Estimate | None:
    job = longest_that_fits(found.job, window, predictor.predict)
    return predictor.predict(job) if job else None


def what_fits(predictor: Predictor, found: Estimate, window: Window) -> list[str]:
    """Return how many tokens would fit the window, and where to look for other cards, models and profiles."""
    if found.memory.fits is False:
        return where_it_fits(found, predictor.hardware)
    what = "not even one step fits"
    if fewer := _longest(predictor, found, window):
        what = (
            f"--tokens {fewer.job.tokens} ({fewer.job.max_steps:,} steps): {hours(fewer.seconds)}"
        )
    return [
        f"fewer tokens     {what}",
        "other choices    --compare gpus, models or profiles: each with its time in this window",
    ]


def where_it_fits(found: Estimate, known: Hardware) -> list[str]:
    """Return what memory one sequence at a time needs, and which cards have it."""
    job, fitting, needed = found.job.with_settings(mini_batch_size=1), [], 0.0
    for gpu in known.gpus.values():
        need = device_memory(
            job, known, found.memory.target, is_cpu=False, available=gpu.memory_bytes
        )
        needed = need.needed
        if need.fits and gpu.peak_flops:
            fitting.append((gpu.memory_bytes or 0.0, gpu.name))
    shown = ", ".join(name for _, name in sorted(fitting)[:_CARDS_SHOWN])
    more = len(fitting) - _CARDS_SHOWN
    cards = f"fits {shown}" if fitting else "it fits no known card"
    cards += f" and {more} more" if more > 0 else ""
    return [
        f"one sequence at a time needs {needed / GIB:.1f} GiB: {cards}; a shorter --context_length or a smaller "
        f"--model needs less"
    ]


# Square root for AdamW: Malladi et al. 2022 (arXiv:2205.10287). Linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD.
_CLAMP = (0.25, 2.0)  # times the reference rate: beyond these no rule is known to hold
_SURGE = 4.0  # reference batches from which the best rate may fall again (arXiv:2405.14578)


def learning_rates(config: Config, tokens: float | None = None) -> dict[str, Any]:
    """Return each rule's learning rate for the batch size, and the reference: the preset's rate and tokens a step.

    `tokens`: the length where it was not given in steps; the preset may have a rate and a batch for it.
    """
    base = preset(config.model.model, optimizer=config.optim.optimizer)
    if tokens is not None:
        base = override(base, for_length(config.model.model, config.optim.optimizer, tokens))
    rate, batch = base.optim.max_lr, base.batch.total_batch_size
    ratio = config.batch.total_batch_size / batch
    low, high = _CLAMP
    return {
        "sqrt": rate * min(high, max(low, ratio**0.5)),
        "linear": rate * min(high, max(low, ratio)),
        **{"none": rate, "reference_rate": rate, "reference_batch": batch},
    }


def learning_rate_line(found: dict[str, Any], config: Config, request: EstimateRequest) -> str:
    """Write what `learning_rates` found in one line; where nobody typed a rate, with the rule's flag."""
    rule, typed = request.lr_rule, request.max_lr is not None
    size, batch = config.batch.total_batch_size, found["reference_batch"]
    text = f"{'max_lr':<12} {config.optim.max_lr:<14g} "
    if size == batch and config.optim.max_lr == found["none"]:
        return f"{text}the preset's"
    text += f"the preset's is {found['none']:g} at {batch:,} tokens a step"
    if size == batch:
        return text
    text += (
        f"; at these {size:,} by the rule sqrt {found['sqrt']:.2g}, linear {found['linear']:.2g}"
    )
    text += "" if typed else f"; --lr_rule {rule}: --max_lr {found[rule]:.2g}"
    if size > _SURGE * batch:
        text += f"; above {_SURGE:g} times the reference batch the best rate may fall again"
    return text
