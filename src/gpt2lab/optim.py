"""The optimizers of a run: one place to add another."""

from __future__ import annotations

import torch
from torch import nn

from gpt2lab.config import OptimConfig

BETAS = (0.9, 0.95)  # Brown et al. 2020, appendix B
EPS = 1e-8


def build_optimizers(
    model: nn.Module, config: OptimConfig, *, device: torch.device
) -> list[torch.optim.Optimizer]:
    """Return optimizers whose groups hold every trainable parameter exactly once.

    Matrices and embeddings decay, vectors (biases, norm gains) do not. Each group's rate is the schedule's times
    its `lr_scale`.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if p.dim() >= 2],
            "weight_decay": config.weight_decay,
            "lr_scale": 1.0,
        },
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    fused = device.type in ("cuda", "cpu")
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=config.max_lr, betas=BETAS, eps=EPS, fused=fused)
    ]
    assert_partition(optimizers, trainable)
    return optimizers


def assert_partition(
    optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> None:
    """Check that each parameter is in one group of one optimizer, and nothing else is."""
    held = [
        id(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert sorted(held) == sorted(id(p) for p in parameters), (
        "optimizer groups do not partition the parameters"
    )


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set every group's rate for the coming step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
