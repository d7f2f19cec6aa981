"""The optimizers of a run; add another here."""

from __future__ import annotations

import torch
from torch import nn

from gpt2lab.config.schema import OptimConfig
from gpt2lab.optim.adamw import AdamW, skip_tracer
from gpt2lab.optim.muon import Muon
from gpt2lab.optim.schedule import muon_scale

EPS = 1e-8
# The matrices of a block, by the number stacked in one parameter: c_attn holds queries, keys and values.
_PARTS = {"c_attn.weight": 3, "c_proj.weight": 1, "c_fc.weight": 1}


def build_optimizers(
    model: nn.Module, config: OptimConfig, *, device: torch.device
) -> list[torch.optim.Optimizer]:
    """Return optimizers whose groups hold every trainable parameter exactly once.

    Weight decay applies to matrices and embeddings, not to vectors (biases, norm gains). Each group's learning rate is
    the schedule's times its `lr_scale`. Muon trains the matrices of the blocks, AdamW the rest.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden: dict[str, nn.Parameter] = {}
    if config.has_muon:
        in_blocks = [(name, p) for name, p in named if name.startswith("blocks.")]
        hidden = {name: p for name, p in in_blocks if name.endswith(tuple(_PARTS))}
    rest = [p for name, p in named if name not in hidden]
    decay = config.weight_decay
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay, "lr_scale": 1.0},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    fused = device.type in ("cuda", "cpu")
    skip_tracer()
    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        AdamW(groups, lr=config.max_lr, betas=betas, eps=EPS, fused=fused)
    ]
    if hidden:
        scale = muon_scale(config)
        alike = {end: [p for name, p in hidden.items() if name.endswith(end)] for end in _PARTS}
        muon_groups = [
            {"params": alike[end], "parts": parts, "weight_decay": decay, "lr_scale": scale}
            for end, parts in _PARTS.items()
        ]
        even_rows = config.optimizer == "normuon"
        optimizers.append(Muon(muon_groups, lr=config.max_lr, even_rows=even_rows))
    assert_partition(optimizers, [p for _, p in named])
    return optimizers


def assert_partition(
    optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> None:
    """Assert that the groups hold each of the parameters once, and no others."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in parameters), (
        "optimizer groups do not partition the parameters"
    )


def can_reject_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `reject_on_device` works: for Muon and fused AdamW, of full or of sharded weights."""
    if isinstance(optimizer, AdamW):
        return all(group["fused"] for group in optimizer.param_groups)
    return isinstance(optimizer, Muon)


def reject_on_device(
    optimizers: list[torch.optim.Optimizer], numbers: tuple[torch.Tensor, ...]
) -> None:
    """Let the next `step` change nothing if one of the numbers, each (), is not finite.

    The device decides, as for torch.amp.GradScaler: nothing waits for it. The optimizer's state stays too.
    """
    are_finite = torch.isfinite(torch.stack(numbers)).all()
    for optimizer in optimizers:
        optimizer.found_inf = 1.0 - are_finite.float()  # type: ignore[attr-defined]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set every group's learning rate for the coming step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
