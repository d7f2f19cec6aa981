"""Which layers get a LoRA adapter, and how many numbers adapters have. No torch."""

from __future__ import annotations

from gpt2lab.config.schema import ModelConfig, TuningConfig
from gpt2lab.errors import ConfigError

# Of each matrix of a block, rows plus columns, in widths C.
_SIDES = {"attn.c_attn": 1 + 3, "attn.c_proj": 1 + 1, "mlp.c_fc": 1 + 4, "mlp.c_proj": 4 + 1}


def targets_of(config: TuningConfig) -> list[str]:
    """Return the names in `lora_targets`."""
    return [word.strip() for word in config.lora_targets.split(",")]


def is_named(layer: str, target: str) -> bool:
    """Tell whether a target means a layer: its full name, or the end of it after a dot."""
    return target != "" and f".{layer}".endswith(f".{target}")


def refuse_targets(model: ModelConfig, config: TuningConfig) -> None:
    """Refuse a target that means no layer.

    Raises: ConfigError naming the layers there are.
    """
    layers = [f"blocks.{block}.{name}" for block in range(model.n_layer) for name in _SIDES]
    for target in targets_of(config):
        if not any(is_named(layer, target) for layer in layers):
            ends = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(
                f"lora_targets {target!r} matches no linear layer of the model; there are {', '.join(ends)} "
                f"(one of a kind: {layers[0]}, and so on)"
            )


def count_adapters(model: ModelConfig, config: TuningConfig) -> int:
    """Count the numbers in all adapters: r (rows + columns) beside each matrix that is a target."""
    sides = sum(
        widths
        for block in range(model.n_layer)
        for name, widths in _SIDES.items()
        if any(is_named(f"blocks.{block}.{name}", target) for target in targets_of(config))
    )
    return config.lora_r * sides * model.n_embd
