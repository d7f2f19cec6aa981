"""Settings by the names that people type: flat values, their resume policy, and what cannot work."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpt2lab.config.schema import LENGTHS, Config, ModelConfig, Policy
from gpt2lab.errors import ConfigError


def _leaves() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Map each flag name to (section name, its field)."""
    return {
        leaf.name: (section.name, leaf)
        for section in fields(Config)
        for leaf in fields(section.default_factory)  # type: ignore[arg-type]
    }


LEAVES = _leaves()
# What shapes the weights: two models are of one architecture where these agree.
ARCHITECTURE = tuple(
    leaf.name for leaf in fields(ModelConfig) if leaf.metadata["policy"] == "fixed"
)
SIZES = ("n_layer", "n_head", "n_embd", "context_length", "vocab_size")


def options_of(model: ModelConfig) -> str:
    """Name the options in which a model is not GPT-2, e.g. `positions rotary`; empty for GPT-2."""
    plain = ModelConfig()
    return ", ".join(
        f"{name} {getattr(model, name)}"
        for name in ARCHITECTURE
        if name not in SIZES and getattr(model, name) != getattr(plain, name)
    )


def policy_of(name: str, config: Config) -> Policy:
    """Return the resume policy of a flag; a re-cut micro-batch redraws dropout masks, hence the one exception."""
    if name == "mini_batch_size" and config.model.dropout > 0:
        return "guarded"
    policy: Policy = LEAVES[name][1].metadata["policy"]
    return policy


def is_path(name: str) -> bool:
    """Tell whether a flag names a file or folder."""
    return "Path" in str(LEAVES[name][1].type)


def data_name(config: Config) -> str:
    """Name the shards or conversations of a run, without the folder that they lie in."""
    source = config.tuning.instructions
    if source is None:
        return config.data.data_dir.name
    return source if source.startswith("hf:") else Path(source).name


def to_flat(config: Config) -> dict[str, Any]:
    """Return {flag: JSON value} in declaration order."""
    flat = {}
    for name, (section, _) in LEAVES.items():
        value = getattr(getattr(config, section), name)
        flat[name] = str(value) if isinstance(value, Path) else value
    return flat


def override(config: Config, values: dict[str, Any]) -> Config:
    """Return `config` with flat values replaced.

    Raises: ConfigError on a name that no setting has.
    """
    unknown = sorted(set(values) - set(LEAVES))
    if unknown:
        raise ConfigError(
            f"unknown settings {', '.join(unknown)}: written by another version of gpt2lab?"
        )
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if is_path(name) and value is not None:
            value = Path(value)
        by_section.setdefault(LEAVES[name][0], {})[name] = value
    changed = {
        name: dataclasses.replace(getattr(config, name), **part)
        for name, part in by_section.items()
    }
    return dataclasses.replace(config, **changed)


def find_problems(config: Config) -> list[str]:
    """List every setting that cannot work, each with its value and the fix."""
    flat, problems = to_flat(config), []

    def check(ok: bool, message: str) -> None:
        if not ok:
            problems.append(message)

    for name, (_, leaf) in LEAVES.items():
        value, least, above = flat[name], leaf.metadata.get("least"), leaf.metadata.get("above")
        if value is None:
            continue
        finite = not isinstance(value, float) or math.isfinite(value)
        check(finite, f"{name} {value} is not a finite number")
        if finite and least is not None:
            check(value >= least, f"{name} {value} must be at least {least}")
        if finite and above is not None:
            check(value > above, f"{name} {value} must be above {above}")
    check(flat["seed"] < 2**32, f"seed {flat['seed']} must be below 2**32")
    if flat["min_lr"] is not None:
        check(
            flat["min_lr"] <= flat["max_lr"],
            f"min_lr {flat['min_lr']} is above max_lr {flat['max_lr']}",
        )
    check(0 <= flat["dropout"] < 1, f"dropout {flat['dropout']} must be in [0, 1)")
    check(0 < flat["wsd_decay"] <= 1, f"wsd_decay {flat['wsd_decay']} must be in (0, 1]")
    check(0 < flat["val_fraction"] < 1, f"val_fraction {flat['val_fraction']} must be in (0, 1)")
    if flat["n_head"] >= 1:
        check(
            flat["n_embd"] % flat["n_head"] == 0,
            f"n_embd {flat['n_embd']} is not a multiple of n_head {flat['n_head']}",
        )
        check(
            flat["positions"] == "learned" or flat["n_embd"] // flat["n_head"] % 2 == 0,
            f"positions rotary turns pairs of channels: n_embd {flat['n_embd']} / n_head {flat['n_head']} must be even",
        )
    check(
        flat["histogram_freq"] <= 0 or flat["use_tensorboard"],
        f"histogram_freq {flat['histogram_freq']} needs --use_tensorboard, where histograms are shown",
    )
    check(
        flat["histogram_freq"] <= 0 or flat["parallel"] != "fsdp",
        f"histogram_freq {flat['histogram_freq']} needs whole tensors, and with --parallel fsdp no process has them",
    )
    lengths = [name for name in LENGTHS if flat[name] is not None]
    check(
        len(lengths) <= 1,
        f"{' and '.join(lengths)} both set the length of the run; give one of them",
    )
    check(
        (flat["parallel"], flat["reduce"]) != ("fsdp", "exact"),
        "reduce exact adds up whole gradients, which no process has under fsdp; use --parallel ddp or zero1",
    )
    check(
        flat["optimizer"] == "adamw" or flat["parallel"] == "ddp",
        f"optimizer {flat['optimizer']} updates whole matrices, which --parallel {flat['parallel']} splits; use ddp",
    )
    name = flat["run_name"]
    check(
        name is None
        or (name not in ("", ".", "..") and "/" not in name and not name.startswith(".")),
        f"run_name {name!r} must be a plain folder name; put the folder above it in --checkpoint_dir",
    )
    return problems
