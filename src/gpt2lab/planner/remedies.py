"""What would make a run fit its window or its memory, each way with its hours. No torch."""

from __future__ import annotations

import dataclasses

from gpt2lab import fmt
from gpt2lab.config.presets import preset
from gpt2lab.errors import ConfigError
from gpt2lab.planner import profiles, timing
from gpt2lab.planner.alternatives import MODELS, with_micro_batch, with_world
from gpt2lab.planner.deadline import Window, steps_that_fit, verdict
from gpt2lab.planner.estimate import Estimate, device_memory
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.job import cut_batch
from gpt2lab.planner.machine import Machine, named
from gpt2lab.planner.profiles import Profile
from gpt2lab.planner.report_text import hours
from gpt2lab.planner.setting import Setting


def options(setting: Setting, found: Estimate, profile: Profile, window: Window) -> list[str]:
    """Return what would fit the window, each with its hours: fewer tokens, profile, more or other cards, model."""
    job, text = found.job, []
    on, ratios = setting.machine_for(job)
    if found.memory.fits is False:
        return where_it_fits(found, setting.hardware)
    steps = steps_that_fit(job, window, lambda j: setting.predict_on(on, ratios, j, profile))
    if steps:
        fewer = setting.predict_on(on, ratios, job.with_steps(steps), profile)
        text.append(
            f"fewer tokens     --tokens {fmt.count(fewer.job.tokens)} ({steps:,} steps): {hours(fewer.seconds)}"
        )
    else:
        text.append("fewer tokens     not even one step fits")
    if profile.name != "fast" and setting.ask.context_length is None:
        fast = profiles.find("fast", setting.hardware)
        config = fast.applied(job.config, typed=())
        quick = dataclasses.replace(job, config=cut_batch(config, job.world, typed=False))
        there = setting.predict_on(on, ratios, quick, fast)
        text.append(
            f"faster profile   --profile fast, T {config.model.context_length}: {hours(there.seconds)}"
        )
    if setting.gpu is not None:
        text += _more_cards(setting, found, profile, window)
    smaller = _smaller_model(setting, found, profile)
    return [*text, *smaller]


def _more_cards(setting: Setting, found: Estimate, profile: Profile, window: Window) -> list[str]:
    text, gpu = [], setting.gpu
    assert gpu is not None
    for count in (2, 4, 8):
        if count <= found.job.world:
            continue
        try:
            on = named(
                gpu,
                setting.hardware,
                gpus=count,
                nodes=1,
                interconnect=None,
                rates=found.machine.rates,
            )
            more = setting.predict_on(on, {}, with_world(found.job, count), profile)
        except ConfigError:
            break
        if verdict(more, window) == "fits":
            text.append(f"more cards       --gpus {count}: {hours(more.seconds)}")
            break
    others: list[tuple[float, str]] = []
    for other in setting.hardware.gpus.values():
        if other.name == gpu.name:
            continue
        try:
            rates = timing.roofline(other, setting.hardware, compiled=found.job.compiled)
            on = named(
                other,
                setting.hardware,
                gpus=found.job.world,
                nodes=1,
                interconnect=None,
                rates=rates,
            )
            there = setting.predict_on(on, {}, found.job, profile)
        except ConfigError:
            continue
        if verdict(there, window) == "fits":
            cost = there.cost.usd.value if there.cost else float("inf")
            others.append((cost, f"other card       --gpu {other.name}: {hours(there.seconds)}"))
    return text + [line for _, line in sorted(others)[:1]]


def _smaller_model(setting: Setting, found: Estimate, profile: Profile) -> list[str]:
    here = found.job.parameters
    for name in reversed(MODELS):
        model = preset(name).model
        small = dataclasses.replace(
            found.job,
            config=dataclasses.replace(
                found.job.config,
                model=dataclasses.replace(
                    model, context_length=found.job.config.model.context_length
                ),
            ),
        )
        if small.parameters < here:
            there = setting.predict(small, profile)
            return [f"smaller model    --model {name}, as many tokens: {hours(there.seconds)}"]
    return []


def where_it_fits(found: Estimate, known: Hardware) -> list[str]:
    """Say what memory one sequence at a time needs, and which cards have it."""
    job = with_micro_batch(found.job, 1)
    fitting = []
    needed = 0.0
    for gpu in known.gpus.values():
        on = Machine(
            gpu.name,
            gpu.name,
            "gpu",
            gpu,
            job.world,
            1,
            None,
            gpu.memory_bytes,
            found.machine.rates,
        )
        need = device_memory(job, on, known, found.memory.target)
        needed = need.needed
        if need.fits and gpu.peak_flops:
            fitting.append(gpu.name)
    shorter = "; a shorter --context_length or a smaller --model needs less"
    if not fitting:
        return [
            f"one sequence at a time needs {needed / 2**30:.1f} GiB: it fits no known card{shorter}"
        ]
    return [
        f"one sequence at a time needs {needed / 2**30:.1f} GiB: fits {', '.join(fitting)}{shorter}"
    ]
