"""What a resume may change: settings that differ from the saved ones, and which of them are rejected. No torch."""

from __future__ import annotations

from typing import Any

from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import policy_of, to_flat
from gpt2lab.errors import ConfigError

_LOCATION = ("checkpoint_dir", "run_name")


def find_changes(saved: Config, now: Config) -> dict[str, list[Any]]:
    """Return {flag: [saved, now]} of all that differs but where the run lies."""
    before, after = to_flat(saved), to_flat(now)
    return {
        name: [before[name], after[name]]
        for name in after
        if name not in _LOCATION and before[name] != after[name]
    }


def describe_change(name: str, change: list[Any]) -> str:
    """Write what a setting was and is; of a fingerprint as much as is shown elsewhere."""
    before, now = (str(value)[:12] if name == "data" else value for value in change)
    return f"{before} -> {now}"


def reject_changes(
    request: RunRequest, config: Config, changes: dict[str, list[Any]], *, run: str
) -> None:
    """Reject changes of what is fixed, and of what is guarded without --allow_change; other data count as guarded.

    Raises: ConfigError naming each setting, and the flag that allows it.
    """
    allowed = set(request.allowed_changes)
    if "max_lr" in allowed and "min_lr" not in request.chosen:
        allowed.add("min_lr")  # it follows
    policies = {name: "guarded" if name == "data" else policy_of(name, config) for name in changes}
    fixed = [name for name, policy in policies.items() if policy == "fixed"]
    guarded = [n for n, policy in policies.items() if policy == "guarded" and n not in allowed]

    def show(names: list[str]) -> str:
        return ", ".join(f"{name} {describe_change(name, changes[name])}" for name in names)

    recounted: list[str] = [name for name in ("total_batch_size", "data") if name in changes]
    if recounted and config.length.max_steps is None:
        raise ConfigError(
            f"run {run}: with {show(recounted)} a length in epochs or tokens means another number of steps; "
            f"say how many with --max_steps N --allow_change max_steps,{','.join(recounted)}"
        )
    if fixed:
        what = (
            "with another architecture"
            if fixed != ["init_from"]
            else "from different initial weights"
        )
        raise ConfigError(f"run {run} cannot continue {what}: {show(fixed)}; start a new run")
    if "optimizer" in changes and "max_lr" not in request.chosen:
        before, now = changes["optimizer"]
        raise ConfigError(
            f"run {run}: optimizer {before} -> {now}, and max_lr {config.optim.max_lr:g} was chosen for {before}; "
            f"give the rate for {now}, too: --max_lr RATE --allow_change optimizer,max_lr"
        )
    if guarded:
        named = [name for name in guarded if name in request.chosen or name == "data"] or guarded
        raise ConfigError(
            f"run {run} would change the training computation: {show(guarded)}; "
            f"leave it as it was, or add --allow_change {','.join(named)} to record the change"
        )
