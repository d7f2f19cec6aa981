"""Named models: settings that differ from the defaults. Data, not code.

The GPT-2 sizes are those of Radford et al. 2019, table 2, and of the released checkpoints. The small ones are for
CPUs: their batch, rate and data are set so that `--model NAME` alone trains something sensible.
The modern ones have the same shapes and need fewer tokens to the same loss. Rates of nano, micro and mini are measured,
those of small extrapolated: see docs/modern.md.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from gpt2lab.config.schema import Config, ModelName, OptimConfig
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

# modded-nanogpt's records/track_3_optimization/train_gpt_simple.py: see docs/modern.md.
_SPEEDRUN: dict[str, Any] = {
    **{"n_layer": 12, "n_head": 6, "n_embd": 768, "max_steps": 3250, "shuffle": "none"},
    **{"positions": "half_rotary", "norm": "rmsnorm", "norm_eps": 2**-23, "embedding_norm": "on"},
    **{"qk_norm": "gainless", "attention_scale": 0.12, "activation": "relu2"},
    **{"head": "untied", "logit_cap": 15.0, "weight_init": "fan_in"},
    **{"optimizer": "muon", "muon_adjust_lr": "original", "newton_schulz": "exact"},
    **{"max_lr": 0.025, "embedding_lr": 0.7, "head_lr": 0.004, "vector_lr": 0.015, "min_lr": 0.0},
    **{"lr_schedule": "trapezoid", "wsd_decay": 0.7, "warmup_steps": 0, "grad_clip": 0.0},
    **{"weight_decay": 0.05, "adamw_decay": 0.001, "beta1": 0.8, "beta2": 0.95},
    "adam_eps": 1e-10 / 524_288,  # there gradients are sums over the tokens of a step
}

_TUNED = ("gpt2-micro", "modern-micro")  # for each length, with GPT-2's ids and with 4,096

RATES = ("max_lr", "muon_lr")  # the peak rates, which suit the size of a model
PRESETS: dict[ModelName, dict[str, Any]] = (
    _GPT2
    | {name: _GPT2[twin] | _MODERN | _MODERN_RATES[name] for name, twin in _TWINS.items()}
    | {"speedrun": _SPEEDRUN}
)
OF_OPTIMIZERS = {field.name for field in fields(OptimConfig)} - {"optimizer"}


def preset(name: ModelName, config: Config | None = None, *, optimizer: Any = None) -> Config:
    """Return `config` (default: the defaults) with the preset's settings in place.

    `optimizer`: what is set besides. What a modern preset sets of the optimizer is for Muon and the weights that it
    leaves; AdamW for all weights gets the settings of the GPT-2 preset of the same shape.
    """
    values: dict[str, Any] = {"model": name, **PRESETS[name]}
    if optimizer == "adamw" and "optimizer" in values:
        plain = preset(_TWINS.get(name, "gpt2")).optim
        values |= {name: getattr(plain, name) for name in OF_OPTIMIZERS & values.keys()}
    return override(config or Config(), values)


def for_length(name: ModelName, optimizer: str, tokens: float) -> dict[str, Any]:
    """Return the batch and the peak rates that suit a run of so many tokens; {} for a model that was not tuned so.

    The batch grows with the root of the tokens, in powers of two. Long runs want lower rates of NorMuon, short runs of
    GPT-2 lower ones of AdamW. Fitted to docs/fewer_tokens, whose runs have 50k to 5M tokens; a longer one counts as 5M.
    """
    if name not in _TUNED:
        return {}
    tokens = min(max(tokens, 1.0), 5e6)
    batch = 2 ** round(math.log2(2 * tokens) / 2)
    rates = {}
    if optimizer == "adamw":
        rates = {"max_lr": 4e-3 * min(1.0, tokens / 1e6) ** 0.5}
    elif name in _TWINS:
        more = max(1.0, tokens / 3e5)
        rates = {"max_lr": 4.5e-2 / more**0.5, "muon_lr": 1e-2 / more ** (1 / 3)}
    rounded = {name: float(f"{rate:.2g}") for name, rate in rates.items()}
    return {"total_batch_size": min(max(1024, batch), 4096), **rounded}
