"""Named models: settings that differ from the defaults. Data, not code.

The GPT-2 sizes are those of Radford et al. 2019, table 2, and of the released checkpoints. The small ones are for
CPUs: their batch, rate and data are set so that `--model NAME` alone trains something sensible.
The modern ones have the same shapes and need fewer tokens to the same loss. Rates of nano, micro and mini are measured,
those of small extrapolated: see docs/modern.md.
"""

from __future__ import annotations

from typing import Any

from gpt2lab.config.schema import Config, ModelName
from gpt2lab.config.settings import override

_SMALL: dict[str, Any] = {
    "data_dir": "data/python_stdlib",
    "val_tokens": 65_536,
    "eval_freq": 100,
    "sample_freq": 100,
    "checkpoint_freq": 100,
    "keep_checkpoints": 3,
    "sample_prompt": "def ",
    "shuffle": "windows",
}

_MODERN: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "qk_norm": "rmsnorm",
    "activation": "relu2",
    "optimizer": "normuon",
}

_GPT2: dict[ModelName, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "max_lr": 3e-4},
    "gpt2-large": {
        "n_layer": 36,
        "n_head": 20,
        "n_embd": 1280,
        "max_lr": 2.5e-4,
        "mini_batch_size": 8,
    },
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600, "max_lr": 2e-4, "mini_batch_size": 4},
    "gpt2-nano": _SMALL
    | {"n_layer": 2, "n_head": 2, "n_embd": 64, "context_length": 128}
    | {"total_batch_size": 4096, "mini_batch_size": 8, "max_lr": 3e-3},
    "gpt2-micro": _SMALL
    | {"n_layer": 4, "n_head": 4, "n_embd": 128, "context_length": 256}
    | {"total_batch_size": 4096, "mini_batch_size": 8, "max_lr": 2e-3},
    "gpt2-mini": _SMALL
    | {"n_layer": 6, "n_head": 6, "n_embd": 384, "context_length": 256}
    | {"total_batch_size": 16_384, "mini_batch_size": 8, "max_lr": 1e-3},
}

_TWINS: dict[ModelName, ModelName] = {  # the GPT-2 preset of the same shape
    "modern-small": "gpt2",
    "modern-nano": "gpt2-nano",
    "modern-micro": "gpt2-micro",
    "modern-mini": "gpt2-mini",
}
_MODERN_RATES: dict[ModelName, dict[str, float]] = {
    "modern-small": {"max_lr": 5e-3, "muon_lr": 4e-3},
    "modern-nano": {"max_lr": 3.2e-2},
    "modern-micro": {"max_lr": 3.2e-2, "muon_lr": 1e-2},
    "modern-mini": {"max_lr": 1e-2, "muon_lr": 6e-3},
}

PRESETS: dict[ModelName, dict[str, Any]] = _GPT2 | {
    name: _GPT2[twin] | _MODERN | _MODERN_RATES[name] for name, twin in _TWINS.items()
}

RATES = ("max_lr", "muon_lr")  # the peak rates, which suit the size of a model


def preset(name: ModelName, config: Config | None = None, *, optimizer: Any = None) -> Config:
    """Return `config` (default: the defaults) with the preset's settings in place.

    `optimizer`: what is set besides. The rate of a modern preset is for the weights that Muon leaves to AdamW; AdamW
    for all weights gets the rate of the GPT-2 preset of the same shape.
    """
    values: dict[str, Any] = {"model": name, **PRESETS[name]}
    if optimizer == "adamw" and "optimizer" in values:
        twin = preset(_TWINS[name])
        values |= {"max_lr": twin.optim.max_lr, "muon_lr": None}
    return override(config or Config(), values)
