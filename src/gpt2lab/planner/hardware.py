"""What is known of GPUs, links and prices: hardware.json, each number with its source and date. No torch.

A user's own file, ~/.config/gpt2lab/hardware.json (or $XDG_CONFIG_HOME), merges over it. A GPU that neither knows is
measured or refused, never guessed.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.errors import ConfigError

SHIPPED = Path(__file__).with_name("hardware.json")
# Words that make another chip, or a slice of one, of a name that would match without them.
_OTHER_CHIPS = {"mig", "laptop", "ti", "super", "d", "max", "mobile"}


@dataclass(frozen=True)
class Gpu:
    """One card. Rates are dense bf16; None = no number with a source."""

    name: str
    peak_flops: float | None  # FLOP/s of the data sheet, no sparsity
    matmul_flops: float | None  # FLOP/s of the best matmul that somebody measured
    memory_bytes: float | None  # what a process can use
    bandwidth: float | None  # bytes/s
    link: str | None  # between the cards of a machine
    watts: float | None
    usd_per_hour: float | None
    price_source: str | None
    price_date: str | None
    note: str | None


@dataclass(frozen=True)
class Link:
    """What connects GPUs: the bus bandwidth of an all-reduce by message size, as nccl-tests defines it."""

    name: str
    title: str
    busbw: tuple[tuple[float, float], ...]  # (bytes, bytes/s), sizes ascending
    is_nvlink: bool

    def rate(self, num_bytes: float) -> float:
        """Return the bus bandwidth for one message, bytes/s, linear between the measured sizes."""
        points = self.busbw
        if num_bytes <= points[0][0]:
            return points[0][1]
        for (small, low), (large, high) in itertools.pairwise(points):
            if num_bytes <= large:
                return low + (high - low) * (num_bytes - small) / (large - small)
        return points[-1][1]


@dataclass(frozen=True)
class Hardware:
    """Everything hardware.json holds, after merging."""

    version: int
    gpus: dict[str, Gpu]
    links: dict[str, Link]
    constants: dict[str, float]
    words: dict[str, tuple[frozenset[str], ...]]
    profiles: dict[str, dict[str, Any]]  # profiles.py
    sources: dict[str, dict[str, str]]

    def gpu(self, name: str) -> Gpu:
        """Return the card that a person means by `name`, e.g. H100, rtx4090, a100-40gb.

        Raises: ConfigError with the nearest names.
        """
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        for known in self.gpus:
            bare = re.sub(r"[^a-z0-9]", "", known.lower())
            if plain in (bare, bare.removeprefix("rtx"), "nvidia" + bare):
                return self.gpus[known]
        found = self.recognise(name)
        if found is not None:
            return found
        lowered = {known.lower(): known for known in self.gpus}
        near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.3)
        names = ", ".join(lowered[match] for match in near) or ", ".join(self.gpus)
        raise ConfigError(
            f"gpu {name!r} is not in hardware.json; nearest: {names}. Measure it there with --measure, or add it "
            f"to {user_file()}"
        )

    def recognise(self, device_name: str) -> Gpu | None:
        """Return the card behind a driver's device name; None if it is not known for certain."""
        tokens = set(re.split(r"[^a-z0-9]+", device_name.lower()))
        if tokens & _OTHER_CHIPS:
            return None
        best, score = None, 0
        for name, alternatives in self.words.items():
            for words in alternatives:
                if words <= tokens and len(words) > score:
                    best, score = name, len(words)
        return self.gpus[best] if best else None

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
            _merge(document, json.loads(path.read_text()))
            return _parse(document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not readable as hardware ({type(error).__name__}: {error}); "
                f"write it like {SHIPPED.name}, or move it away"
            ) from None
    return _parse(document)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s, or None where it is not known: its MFU is then n/a."""
    gpu = load().recognise(device_name)
    return gpu.peak_flops if gpu else None


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
        return float(value) * factor

    gpus, words = {}, {}
    for name, entry in document["gpus"].items():
        price = entry.get("usd_per_hour")
        gpus[name] = Gpu(
            name=name,
            peak_flops=number(entry, "bf16_tflops", 1e12),
            matmul_flops=number(entry, "matmul_tflops", 1e12),
            memory_bytes=number(entry, "memory_gib", 2**30),
            bandwidth=number(entry, "bandwidth_gbs", 1e9),
            link=entry.get("link"),
            watts=number(entry, "watts", 1.0),
            usd_per_hour=number(entry, "usd_per_hour", 1.0),
            price_source=price[1] if price else None,
            price_date=sources[price[1]]["date"] if price else None,
            note=entry.get("note"),
        )
        words[name] = tuple(frozenset(group) for group in entry["words"])
    links = {}
    for name, entry in document["links"].items():
        sources[entry["source"]]
        points = sorted(
            (float(mib) * 2**20, float(rate) * 1e9) for mib, rate in entry["busbw_gbs"].items()
        )
        links[name] = Link(name, entry["title"], tuple(points), bool(entry["nvlink"]))
    constants = {}
    for name, (value, source) in document["constants"].items():
        sources[source]
        constants[name] = float(value)
    return Hardware(
        version=document["version"],
        gpus=gpus,
        links=links,
        constants=constants,
        words=words,
        profiles=document["profiles"],
        sources=sources,
    )
