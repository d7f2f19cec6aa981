"""What is known of GPUs, links, prices and profiles: hardware.json, each number with its source and date. No torch.

A user's own file, ~/.config/gpt2lab/hardware.json (or $XDG_CONFIG_HOME), merges over it. A GPU that neither knows is
measured or an error, never guessed. A profile is a named trade-off between speed, loss and memory; tokens per step and
learning rate are the same in all of them, so that their losses can be compared.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.config.derived import MANY_EPOCHS
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.files import POSITIVE, SIZE, STRING, mismatch, or_null, parse_json

SHIPPED = Path(__file__).with_name("hardware.json")
DEFAULT_PROFILE = "balanced"
# A device name with one of these words is another chip, or a slice of one, than the name without it.
_OTHER_CHIPS = {"mig", "laptop", "ti", "super", "d", "max", "mobile"}
_PROFILE = {
    **{"about": STRING, "context_length": or_null(SIZE)},
    **dict.fromkeys(("memory_target", "tokens_per_parameter", "eval_interval"), POSITIVE),
}


class NoSourceError(GPT2LabError):
    """A forecast has no basis: no run, no known hardware, no measurement."""

    exit_code = 4


@dataclass(frozen=True)
class Gpu:
    """One card. Rates are dense, of `dtype`; None = no number with a source."""

    name: str
    dtype: Literal["bf16", "fp16"]  # what its tensor cores multiply
    peak_flops: float | None  # FLOP/s of the data sheet, no sparsity
    matmul_flops: float | None  # FLOP/s of the best matmul that somebody measured
    memory_bytes: float | None  # what a rank can use
    bandwidth: float | None  # bytes/s
    link: str | None  # between the cards of a machine
    watts: float | None
    joules_per_flop: float | None  # of a matmul at full power
    usd_per_hour: float | None
    price_source: str | None
    price_date: str | None
    note: str | None

    def has_rate(self, dtype: str) -> bool:
        """Tell whether the rates are those of a dtype: bf16 and fp16 are equally fast, fp32 is slower by far."""
        return dtype != "fp32"

    def sustained_flops(self, fraction: float) -> float | None:
        """Return FLOP/s of large matmuls: measured, else `fraction` of the peak and what the board's power allows."""
        if self.matmul_flops or self.peak_flops is None:
            return self.matmul_flops
        flops = fraction * self.peak_flops
        if self.watts is None or self.joules_per_flop is None:
            return flops
        return min(flops, self.watts / self.joules_per_flop)


@dataclass(frozen=True)
class Link:
    """What connects GPUs: the bus bandwidth of an all-reduce by message size, as nccl-tests defines it."""

    name: str
    title: str
    busbw: tuple[tuple[float, float], ...]  # (bytes, bytes/s), sizes ascending
    is_nvlink: bool

    def rate(self, num_bytes: float) -> float:
        """Return the bus bandwidth for one message, bytes/s, linear between the measured sizes."""
        sizes, rates = zip(*self.busbw, strict=True)
        return float(np.interp(num_bytes, sizes, rates))


@dataclass(frozen=True)
class Profile:
    """One trade-off between speed, loss and memory."""

    name: str
    about: str
    context_length: int | None  # at most; None = the model's own
    memory_target: float  # share of a device's memory
    tokens_per_parameter: float
    eval_interval: float  # times the usual number of steps between evaluations and samples

    def applied(self, config: Config, *, typed: Collection[str]) -> Config:
        """Return the settings with this profile's values for those that nobody typed."""
        context, own = self.context_length, config.model.context_length
        values = {
            "context_length": own if context is None else min(context, own),
            "eval_freq": round(config.eval.eval_freq * self.eval_interval),
            "sample_freq": round(config.eval.sample_freq * self.eval_interval),
        }
        return override(config, {name: v for name, v in values.items() if name not in typed})


@dataclass(frozen=True)
class Hardware:
    """Everything hardware.json holds, after merging."""

    version: int
    gpus: dict[str, Gpu]
    links: dict[str, Link]
    constants: dict[str, float]
    words: dict[str, tuple[frozenset[str], ...]]
    profiles: dict[str, Profile]
    sources: dict[str, dict[str, str]]

    def gpu(self, name: str) -> Gpu:
        """Return the card that a person means by `name`, e.g. H100, rtx4090, a100-40gb.

        Raises: NoSourceError with the nearest names.
        """
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        for known in self.gpus:
            bare = re.sub(r"[^a-z0-9]", "", known.lower())
            if plain in (bare, bare.removeprefix("rtx"), "nvidia" + bare):
                return self.gpus[known]
        if (found := self.recognise(name)) is not None:
            return found
        lowered = {known.lower(): known for known in self.gpus}
        near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.3)
        nearest = f", nearest: {', '.join(lowered[match] for match in near)}" if near else ""
        raise NoSourceError(
            f"gpu {name!r} is not in hardware.json{nearest}; gpt2lab estimate --list_gpus shows all; "
            f"measure it there with --measure, or add it to {user_file()}"
        )

    def recognise(self, device_name: str) -> Gpu | None:
        """Return the card of a driver's device name; None if it is not known for certain."""
        tokens = set(re.split(r"[^a-z0-9]+", device_name.lower()))
        if tokens & _OTHER_CHIPS:
            return None
        named = [(words, name) for name, groups in self.words.items() for words in groups]
        fitting = [(len(words), name) for words, name in named if words and words <= tokens]
        return self.gpus[max(fitting, key=lambda found: found[0])[1]] if fitting else None

    def link(self, name: str) -> Link:
        """Return a link by name.

        Raises: ConfigError with the known names.
        """
        if name not in self.links:
            raise ConfigError(f"interconnect {name!r} is not known; one of {', '.join(self.links)}")
        return self.links[name]


def user_file() -> Path:
    """Return where a user's additions are read from."""
    return paths.of_user("XDG_CONFIG_HOME", ".config") / "gpt2lab" / "hardware.json"


@functools.cache
def load(user: Path | None = None) -> Hardware:
    """Read the shipped file and merge the user's over it, entry by entry.

    Raises: ConfigError if the user's file cannot be read.
    """
    document = json.loads(SHIPPED.read_text())
    path = user or user_file()
    if path.exists():
        try:
            more = parse_json(path.read_text())
            _reject_unknown(more, document)
            _merge(document, more)
            return _parse(document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not readable as hardware ({type(error).__name__}: {error}); "
                f"use the format of {SHIPPED.name}, or move the file away"
            ) from None
    return _parse(document)


def peak_flops(device_name: str) -> float | None:
    """Return the dense peak of bf16, else of fp16, in FLOP/s, or None where it is not known: its MFU is then n/a."""
    gpu = load().recognise(device_name)
    return gpu.peak_flops if gpu else None


def day_of(date: str) -> datetime.date:
    """Return the day of `2026-11-26`, or the first one of `2026-11` or `2026`."""
    return datetime.date(*([*map(int, date.split("-")), 1, 1])[:3])


def _reject_unknown(more: dict[str, Any], shipped: dict[str, Any]) -> None:
    def check(where: str, given: dict[str, Any], known: Collection[str]) -> None:
        for name in sorted(given.keys() - set(known)):
            hint = fmt.did_you_mean(name, known, f"known are {', '.join(known)}")
            raise ValueError(f"unknown {where}{name}: {hint}")

    check("", more, shipped)
    check("constants ", more.get("constants", {}), shipped["constants"])
    for part in ("gpus", "links", "profiles", "sources"):
        keys = {key: None for entry in shipped[part].values() for key in entry}
        for name, entry in more.get(part, {}).items():
            check(f"{part} {name} ", entry, keys)


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict) and key != "busbw_gbs":
            _merge(into[key], value)
        else:
            into[key] = value


def _parse(document: dict[str, Any]) -> Hardware:
    sources = document["sources"]

    def number(entry: dict[str, Any], key: str, factor: float) -> float | None:
        if entry.get(key) is None:
            return None
        value, source = entry[key]
        sources[source]  # a number without a source is an error of the file
        if not float(value) > 0 and (key, value) != ("usd_per_hour", 0):
            raise ValueError(f"{key} {value} must be above 0")
        return float(value) * factor

    gpus, words = {}, {}
    for name, entry in document["gpus"].items():
        price, dated = entry.get("usd_per_hour"), None
        if price:
            dated = sources[price[1]]["date"]
            day_of(dated)  # rejects what is no date
        gpus[name] = Gpu(
            name=name,
            dtype="fp16" if "fp16_tflops" in entry else "bf16",
            peak_flops=number(entry, "bf16_tflops", 1e12) or number(entry, "fp16_tflops", 1e12),
            matmul_flops=number(entry, "matmul_tflops", 1e12),
            memory_bytes=number(entry, "memory_gib", 2**30),
            bandwidth=number(entry, "bandwidth_gbs", 1e9),
            link=entry.get("link"),
            watts=number(entry, "watts", 1.0),
            joules_per_flop=number(entry, "pj_per_flop", 1e-12),
            usd_per_hour=number(entry, "usd_per_hour", 1.0),
            price_source=price[1] if price else None,
            price_date=dated,
            note=entry.get("note"),
        )
        words[name] = tuple(frozenset(group) for group in entry["words"])
    links = {}
    for name, entry in document["links"].items():
        sources[entry["source"]]
        points = sorted(
            (float(mib) * 2**20, float(rate) * 1e9) for mib, rate in entry["busbw_gbs"].items()
        )
        if not points or not min(rate for _, rate in points) > 0:
            raise ValueError(f"link {name}: busbw_gbs needs rates above 0")
        links[name] = Link(name, entry["title"], tuple(points), bool(entry["nvlink"]))
    constants = {}
    for name, (value, source) in document["constants"].items():
        sources[source]
        constants[name] = float(value)
    for name, entry in document["profiles"].items():
        if (problem := mismatch(entry, _PROFILE)) is not None:
            raise ValueError(f"profile {name}: {problem}")
    profiles = {name: Profile(name, **entry) for name, entry in document["profiles"].items()}
    return Hardware(document["version"], gpus, links, constants, words, profiles, sources)


def advise_profile(unique_tokens: int, *, parameters: int, known: Collection[Profile]) -> str:
    """Name the profile that a dataset of this size has enough text for.

    Up to four passes over the same text teach nearly as much as new text would (Muennighoff et al. 2023,
    arXiv:2305.16264), so a profile is within reach if four passes give its tokens a parameter.
    """
    reach = MANY_EPOCHS * unique_tokens / parameters
    size = f"{unique_tokens:,} tokens to train on, {unique_tokens / parameters:.2g} a parameter"
    fitting = [profile for profile in known if profile.tokens_per_parameter <= reach]
    if not fitting:
        least = min(profile.tokens_per_parameter for profile in known)
        return (
            f"{size}: even {MANY_EPOCHS} passes are fewer than the {least:g} of the leanest profile; "
            f"take a model of at most {MANY_EPOCHS * unique_tokens / least:,.0f} parameters, or more text"
        )
    best = max(fitting, key=lambda profile: profile.tokens_per_parameter)
    passes = best.tokens_per_parameter * parameters / unique_tokens
    return f"{size}: --profile {best.name}, about {passes:.2g} passes"


def find_profile(name: str | None, hardware: Hardware) -> Profile:
    """Return a profile by name, the default for None.

    Raises: ConfigError with the nearest names.
    """
    known = hardware.profiles
    wanted = DEFAULT_PROFILE if name is None else name
    if wanted not in known:
        hint = fmt.did_you_mean(wanted, known, f"one of {', '.join(known)}")
        raise ConfigError(f"profile {wanted!r} is not known: {hint}")
    return known[wanted]
