"""LoRA: low-rank adapters beside frozen linear layers. Hu et al. 2021, arXiv:2106.09685, section 4.1."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gpt2lab.config.schema import TuningConfig
from gpt2lab.model import rng
from gpt2lab.model.counts import is_target, lora_targets
from gpt2lab.model.gpt import GPT


class LoRALinear(nn.Linear):
    """A frozen linear layer plus x A^T B^T alpha / r. Weight and bias keep their names in the model."""

    def __init__(self, layer: nn.Linear, *, r: int, alpha: float) -> None:
        """Share `layer`'s weight and bias; the adapter's values come from `init_adapters` or a checkpoint."""
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / r
        self.lora_A = nn.Parameter(layer.weight.new_zeros(r, layer.in_features))
        self.lora_B = nn.Parameter(layer.weight.new_zeros(layer.out_features, r))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in) to (..., out)."""
        return super().forward(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale

    def merged(self) -> nn.Linear:
        """Return a plain linear layer that computes the same, up to rounding."""
        layer = nn.Linear(self.in_features, self.out_features, device="meta")
        with torch.no_grad():
            weight = self.weight + self.lora_B @ self.lora_A * self.scale
        layer.weight, layer.bias = nn.Parameter(weight), self.bias
        return layer


def add_lora(model: GPT, config: TuningConfig) -> None:
    """Freeze the model, and add an adapter, still zero, to each linear layer that `lora_targets` names, in place."""
    targets = lora_targets(config)
    chosen = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and any(is_target(name, target) for target in targets)
    }
    model.requires_grad_(False)  # the adapters added below are trained
    for name, layer in chosen.items():
        model.set_submodule(name, LoRALinear(layer, r=config.lora_r, alpha=config.lora_alpha))


def init_adapters(model: GPT, *, seed: int) -> None:
    """Draw every A as nn.Linear and peft do, within 1 / sqrt(in), from the seed alone; every B is zero."""
    generator = torch.Generator().manual_seed(rng.fold_seed(seed, 0))
    for _, layer in _adapters(model):
        bound = layer.in_features**-0.5
        values = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            layer.lora_A.copy_(values)
            layer.lora_B.zero_()


def merge_lora(model: GPT) -> None:
    """Merge the adapters into the weights, in place: a plain model again."""
    for name, layer in _adapters(model):
        model.set_submodule(name, layer.merged())
    model.requires_grad_(True)


def _adapters(model: GPT) -> list[tuple[str, LoRALinear]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, LoRALinear)]
