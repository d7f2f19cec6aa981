"""`--branch_from RUN@STEP` and `--cooldown N`: a new run that continues from a checkpoint of another. No torch."""

from __future__ import annotations

import dataclasses
import os
import re

from gpt2lab import fmt
from gpt2lab.checkpoint import catalog
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import LENGTHS, Config
from gpt2lab.config.settings import both_set_length
from gpt2lab.errors import ConfigError
from gpt2lab.runs.target import find_run

_UNASKED = frozenset({*LENGTHS, "wsd_decay", "wsd_shape"})  # what a branch of a wsd run may change


def as_branch(request: RunRequest, origin: str | None, cooldown: str | None) -> RunRequest:
    """Return the request that begins a branch at `origin`, RUN@STEP, or that continues it, with --resume auto.

    Of a run with the schedule wsd the length and the decay may change unasked; `cooldown` sets both.

    Raises: ConfigError, CheckpointError.
    """
    if origin is None:
        if cooldown is not None:
            raise ConfigError(
                "--cooldown goes with --branch_from RUN@STEP, of a run of --lr_schedule wsd"
            )
        return request
    if request.resume not in (None, "auto"):
        raise ConfigError(
            f"--branch_from begins a run, --resume {request.resume} continues one; give one of them "
            f"(--resume auto begins the branch once, and then continues it)"
        )
    run, _, at = origin.rpartition("@")
    if not run or re.fullmatch(r"[0-9]{1,18}|best|latest", at) is None:
        raise ConfigError(
            f"--branch_from {origin}: give RUN@STEP, such as my_run@1000, RUN@best or RUN@latest"
        )
    at = str(int(at)) if at.isdecimal() else at
    place = request.config.checkpoint
    infos: list[catalog.CheckpointInfo] = []
    if request.resume is not None and place.run_name is not None:
        infos, _ = catalog.list_checkpoints(place.checkpoint_dir / place.run_name)
    if infos:
        newest, known = infos[-1], infos[-1].manifest.get("branch_from") or {}
        name, began_in = os.path.basename(os.path.abspath(run)), str(known.get("run", ""))
        is_whole = catalog.find_folder(run, place.checkpoint_dir) is not None
        is_same = began_in == name if is_whole else began_in.startswith(name)
        if not known or not is_same or at not in ("best", "latest", str(known["step"])):
            began = f"began at {known['run']}@{known['step']}" if known else "is no branch"
            raise ConfigError(
                f"run {place.run_name} {began}, and --branch_from is {origin}; choose another --run_name, or leave "
                f"out --branch_from"
            )
        step = known["step"]
    else:
        trunk = find_run(run, place.checkpoint_dir)
        found, _ = catalog.list_checkpoints(trunk)  # every byte is verified where it is resolved
        fitting = [info for info in found if at in ("latest", str(info.step), *info.labels)]
        newest = fitting[-1] if fitting else catalog.find(trunk, at)  # which names those there are
        resume = None if place.run_name else request.resume  # which is rejected: auto needs a name
        for folder in catalog.newer_than(trunk, newest.step) if at == "latest" else ():
            catalog.open_checkpoint(folder)  # says what is damaged
        request = dataclasses.replace(request, branch_from=newest.path, resume=resume)
        step = newest.step
    saved = newest.config()
    if cooldown is not None:
        request = _with_cooldown(request, saved, cooldown, step=step, origin=origin)
    if saved.optim.lr_schedule == "wsd" and not infos:
        allowed = request.allowed_changes | _UNASKED
        request = dataclasses.replace(request, allowed_changes=allowed)
    return request


def _with_cooldown(
    request: RunRequest, saved: Config, cooldown: str, *, step: int, origin: str
) -> RunRequest:
    """Return the request whose rate falls from `step` on, over steps, or tokens if the number has a unit."""
    if both := sorted(request.typed & set(LENGTHS)):
        raise ConfigError(both_set_length(["--cooldown", f"--{both[0]}"]))
    if "wsd_decay" in request.typed:
        raise ConfigError("--cooldown sets --wsd_decay; give one of them")
    schedule, warmup = saved.optim.lr_schedule, saved.optim.warmup_steps or 0
    if schedule != "wsd":
        raise ConfigError(
            f"--cooldown: the rate of {origin} follows lr_schedule {schedule}, which falls by itself; a cooldown "
            f"needs a run of --lr_schedule wsd"
        )
    if step < warmup:
        raise ConfigError(
            f"--cooldown: step {step} of {origin} is in the warm-up of {warmup} steps; branch from a later one"
        )
    try:
        steps = fmt.parse_count(cooldown)
    except ValueError as error:
        raise ConfigError(f"--cooldown: {error}; give steps, or tokens such as 100M") from None
    tokens = request.over(saved).batch.total_batch_size
    if cooldown[-1].isalpha():
        steps //= tokens
    if steps < 1:
        raise ConfigError(f"--cooldown {cooldown}: less than one step, of {tokens:,} tokens")
    return request.with_settings(max_steps=step + steps, wsd_decay=steps / (step + steps))
