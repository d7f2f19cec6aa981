"""Named ways to spend a window: what is given up for speed, quality or memory. No torch.

Tokens per step and learning rate are the same in all of them, so that losses can be compared. They stand under
"profiles" in hardware.json; a user's own file adds others.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from dataclasses import dataclass

from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override
from gpt2lab.errors import ConfigError
from gpt2lab.planner.hardware import Hardware

DEFAULT = "balanced"
PASSES = 4  # over the same text


@dataclass(frozen=True)
class Profile:
    """One way to trade speed, loss and memory."""

    name: str
    about: str
    context_length: int | None  # at most; None = the model's own
    memory_target: float  # share of a device's memory
    tokens_per_parameter: float
    eval_interval: float  # times the usual number of steps between evaluations and samples

    def applied(self, config: Config, *, typed: Collection[str]) -> Config:
        """Return the settings with this profile's in place of those that nobody typed."""
        values: dict[str, int] = {}
        context = self.context_length
        if context is not None and context < config.model.context_length:
            values["context_length"] = context
        if self.eval_interval != 1:
            for name in ("eval_freq", "sample_freq"):
                values[name] = round(getattr(config.eval, name) * self.eval_interval)
        return override(config, {name: v for name, v in values.items() if name not in typed})


def profiles(hardware: Hardware) -> dict[str, Profile]:
    """Return all profiles by name.

    Raises: ConfigError if a user's own is not complete.
    """
    fields = [field.name for field in dataclasses.fields(Profile) if field.name != "name"]
    found = {}
    for name, entry in hardware.profiles.items():
        missing = [field for field in fields if field not in entry]
        unknown = [field for field in entry if field not in fields]
        if missing or unknown:
            raise ConfigError(
                f"profile {name!r} of hardware.json: missing {missing}, unknown {unknown}; it needs {', '.join(fields)}"
            )
        found[name] = Profile(name=name, **entry)
    return found


def advise(unique_tokens: int, *, parameters: int, known: Collection[Profile]) -> str:
    """Say which profile a dataset of this size has text for.

    Up to four passes over the same text teach nearly as much as new text would (Muennighoff et al. 2023,
    arXiv:2305.16264), so a profile is within reach if four passes give its tokens a parameter.
    """
    reach = PASSES * unique_tokens / parameters
    size = f"{unique_tokens:,} tokens to train on, {unique_tokens / parameters:.2g} a parameter"
    fitting = [profile for profile in known if profile.tokens_per_parameter <= reach]
    if not fitting:
        least = min(profile.tokens_per_parameter for profile in known)
        return (
            f"{size}: even {PASSES} passes are fewer than the {least:g} of the leanest profile; "
            f"take a model of at most {PASSES * unique_tokens / least:,.0f} parameters, or more text"
        )
    best = max(fitting, key=lambda profile: profile.tokens_per_parameter)
    passes = best.tokens_per_parameter * parameters / unique_tokens
    return f"{size}: --profile {best.name}, about {passes:.2g} passes"


def find(name: str | None, hardware: Hardware) -> Profile:
    """Return a profile by name, the default for None.

    Raises: ConfigError with the nearest names.
    """
    known = profiles(hardware)
    wanted = name or DEFAULT
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
        raise ConfigError(f"profile {wanted!r} is not known: {hint}")
    return known[wanted]
