"""Tables of alternatives: cards, models, profiles, numbers of processes; and what would make a run fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gpt2lab import fmt
from gpt2lab.config.schema import ModelName
from gpt2lab.errors import ConfigError, GPT2LabError, NoSourceError
from gpt2lab.planner import profiles, report_json
from gpt2lab.planner.ask import Comparison
from gpt2lab.planner.deadline import Window, steps_that_fit, verdict
from gpt2lab.planner.estimate import Estimate
from gpt2lab.planner.job import Job, cut_batch
from gpt2lab.planner.machine import named
from gpt2lab.planner.profiles import Profile
from gpt2lab.planner.report_text import dollars, seconds
from gpt2lab.planner.setting import Setting

MODELS: tuple[ModelName, ...] = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def with_micro_batch(job: Job, size: int) -> Job:
    """Return the job cut into other micro-batches; the curve is the same."""
    batch = dataclasses.replace(job.config.batch, mini_batch_size=size)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, batch=batch))


def with_world(job: Job, world: int) -> Job:
    """Return the job shared by another number of processes.

    Raises: ConfigError if the batch does not divide.
    """
    config = cut_batch(job.config, world, typed=False)
    return dataclasses.replace(job, config=config, world=world)


# -- numbers of cards --------------------------------------------------------------------------------------------


def scaling(setting: Setting, found: Estimate, profile: Profile) -> list[dict[str, Any]]:
    """Return one row for each number of cards of --scaling, at a fixed number of tokens a step."""
    ask, job = setting.ask, found.job
    if found.machine.is_cpu or setting.gpu is None:
        return []
    try:
        counts = sorted({int(text) for text in ask.scaling.split(",")} | {job.world})
    except ValueError:
        raise ConfigError(f"--scaling {ask.scaling!r} is not a list like 1,2,4,8") from None
    rows, one = [], None
    for count in counts:
        nodes = ask.nodes if count == job.world else 1
        try:
            shared = with_world(job, count)
            on = named(
                setting.gpu,
                setting.hardware,
                gpus=count,
                nodes=nodes,
                interconnect=ask.interconnect if nodes > 1 or ask.nodes == 1 else None,
                rates=found.machine.rates,
            )
        except ConfigError:
            continue
        there = setting.predict_on(on, {}, shared, profile)
        one = there.step.value if count == 1 else one
        rows.append(
            {
                "gpus": count,
                "step_seconds": there.step.value,
                "hours": there.seconds.value / 3600,
                "efficiency": one / (count * there.step.value) if one else None,
                "usd": there.cost.usd.value if there.cost else None,
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
            "n/a" if row["efficiency"] is None else f"{row['efficiency']:.1%}",
            "n/a" if row["usd"] is None else dollars(row["usd"]),
        ]
        for row in rows
    ]
    return fmt.table(["GPUs", "step", "total", "efficiency*", "cost"], cells) + (
        "\n* of the steps alone; start and events do not shrink with them"
    )


# -- comparisons -------------------------------------------------------------------------------------------------


def print_comparison(
    setting: Setting, profile: Profile, what: Comparison, window: Window | None
) -> int:
    """Print one table and return 0, or 3 if nothing in it fits the window."""
    rows = {"gpus": _gpus, "models": _models, "profiles": _profiles}[what](setting, profile, window)
    if not rows:
        raise NoSourceError(f"--compare {what}: nothing to compare could be estimated")
    fits = [row for row in rows if row["verdict"] in (None, "fits")]
    if setting.ask.json:
        document = report_json.blank() | {"comparison": {"by": what, "rows": rows}}
        document |= {"max_training_hours": window.seconds / 3600 if window else None}
        document["profile_name"] = profile.name
        document["model"] = rows[0]["model_counts"] if what == "gpus" else None
        print(json.dumps(document, allow_nan=False))
        return 0 if fits else 3
    best = min(
        (row for row in fits if row["loss"] is not None), key=lambda row: row["loss"], default=None
    )
    cells = [_cells(row, best if what == "models" and window else None) for row in rows]
    header = [
        what[:-1],
        "tokens",
        "tok/param",
        "time",
        "80 %",
        "cost",
        "$/B tok",
        "loss",
        "verdict",
    ]
    print(fmt.table(header, cells))
    if window:
        print(
            f"window {fmt.duration(window.seconds)} less {fmt.duration(window.margin)}; "
            + (
                "tokens chosen so that the upper bound fits"
                if what != "gpus"
                else "the upper bound decides"
            )
        )
    if best is not None and what == "models" and window:
        print("* lowest predicted loss; differences below 0.10 are within its uncertainty")
    return 0 if fits else 3


def _cells(row: dict[str, Any], best: dict[str, Any] | None) -> list[str]:
    return [
        row["name"] + (" *" if row is best else ""),
        fmt.count(row["tokens"]),
        f"{row['tokens_per_parameter']:.0f}",
        fmt.duration(3600 * row["hours"]),
        f"{fmt.duration(3600 * row['low_hours'])} ... {fmt.duration(3600 * row['high_hours'])}",
        "n/a" if row["usd"] is None else dollars(row["usd"]),
        "n/a" if row["usd"] is None else dollars(row["usd"] / row["tokens"] * 1e9),
        "n/a" if row["loss"] is None else f"{row['loss']:.2f}",
        {"does_not_fit": "no"}.get(row["verdict"], row["verdict"])
        or ("no memory" if row["fits_memory"] is False else ""),
    ]


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


def _gpus(setting: Setting, profile: Profile, window: Window | None) -> list[dict[str, Any]]:
    """Every card of hardware.json, as many as asked for, fastest first."""
    rows = []
    for gpu in setting.hardware.gpus.values():
        try:
            ask = dataclasses.replace(setting.ask, gpu=gpu.name, gpus=setting.ask.gpus or 1)
            there = type(setting)(ask, setting.hardware)
            found = _cut_to_fit(there, there.job(profile), profile)
        except ConfigError:
            continue
        rows.append(_row(found.machine.title, found, window))
    return sorted(rows, key=lambda row: float(row["hours"]))


def _models(setting: Setting, profile: Profile, window: Window | None) -> list[dict[str, Any]]:
    """The GPT-2 sizes; with a window, each with as many tokens as fit it."""
    return [
        row
        for name in MODELS
        if (
            row := _sized(
                setting, dataclasses.replace(setting.ask, model=name), profile, name, window
            )
        )
    ]


def _profiles(setting: Setting, profile: Profile, window: Window | None) -> list[dict[str, Any]]:
    """All profiles, the user's own too."""
    found = profiles.profiles(setting.hardware).values()
    return [
        row
        for one in found
        if (
            row := _sized(
                setting, dataclasses.replace(setting.ask, profile=one.name), one, one.name, window
            )
        )
    ]


def _sized(
    setting: Setting, ask: Any, profile: Profile, name: str, window: Window | None
) -> dict[str, Any] | None:
    there = type(setting)(ask, setting.hardware)
    try:
        found = _cut_to_fit(there, there.job(profile), profile)
    except GPT2LabError:
        return None
    given = any(
        getattr(ask, length) is not None for length in ("tokens", "steps", "epochs", "num_samples")
    )
    if window is not None and not given and found.memory.fits is not False:
        on, ratios = there.machine_for(found.job)
        steps = steps_that_fit(
            found.job, window, lambda job: there.predict_on(on, ratios, job, profile)
        )
        if steps:
            found = there.predict_on(on, ratios, found.job.with_steps(steps), profile)
    return _row(name, found, window)


def _cut_to_fit(setting: Setting, job: Job, profile: Profile) -> Estimate:
    found = setting.predict(job, profile)
    if found.memory.fits is False and found.memory.largest_micro_batch:
        found = setting.predict(with_micro_batch(job, found.memory.largest_micro_batch), profile)
    return found
