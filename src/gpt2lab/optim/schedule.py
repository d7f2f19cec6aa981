"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from gpt2lab.config.schema import OptimConfig


def muon_scale(optim: OptimConfig) -> float:
    """Return the ratio of Muon's learning rate to AdamW's, the same at every step."""
    return 1.0 if optim.muon_lr is None else optim.muon_lr / optim.max_lr


def lr_at(step: int, optim: OptimConfig, *, max_steps: int) -> float:
    """Return the learning rate of update number `step` (1, 2, ... max_steps).

    Linear from 0 over `warmup_steps`, then a decay that starts at max_lr and reaches min_lr at max_steps:
    half a cosine (Brown et al. 2020, appendix B), a line, or warm-up-stable-decay (Hu et al. 2024,
    arXiv:2404.06395), which holds max_lr until the last `wsd_decay` of the run, and falls linearly or as 1 - sqrt
    (Hägele et al. 2024, arXiv:2405.18392). A trapezoid falls linearly and would reach min_lr at max_steps + 1, so that
    the last step still learns (modded-nanogpt).

    Raises: ValueError if warm-up and minimum rate are not resolved to numbers.
    """
    warmup, min_lr = optim.warmup_steps, optim.min_lr
    if warmup is None or min_lr is None:
        raise ValueError("warmup_steps and min_lr must be resolved before the schedule is read")
    if step < warmup:
        return optim.max_lr * step / warmup
    start = warmup
    if optim.lr_schedule == "trapezoid":
        left = (max_steps + 1 - step) / max_steps  # of the run, before the update
        return min_lr + (optim.max_lr - min_lr) * min(1.0, left / optim.wsd_decay)
    if optim.lr_schedule == "wsd":
        start = max(warmup, max_steps - max(1, round(optim.wsd_decay * max_steps)))
    if step <= start or max_steps <= start:
        return optim.max_lr
    progress = min(1.0, (step - start) / (max_steps - start))  # 0 .. 1
    if optim.lr_schedule == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    elif optim.lr_schedule == "wsd" and optim.wsd_shape == "sqrt":
        progress = math.sqrt(progress)
    return optim.max_lr * (1.0 - progress) + min_lr * progress


def describe_rates(optim: OptimConfig) -> str:
    """Name the optimizers of a run with the peak and the final learning rate of each."""
    if not optim.has_muon or optim.min_lr is None:
        return f"{optim.optimizer}, {optim.max_lr:g} -> {optim.min_lr:g}"
    own = {"embedding": optim.embedding_lr, "head": optim.head_lr, "vectors": optim.vector_lr}
    rates = {"muon": muon_scale(optim) * optim.max_lr}
    rates |= {"adamw": optim.max_lr} if None in own.values() else {}
    rates |= {name: rate for name, rate in own.items() if rate is not None}
    floor = optim.min_lr / optim.max_lr
    return ", ".join(f"{name} {rate:g} -> {rate * floor:g}" for name, rate in rates.items())
