"""Next-token cross-entropy, summed: the caller divides once, by the targets of the global batch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed negative log-likelihood in nats, a float32 scalar.

    `logits` (B, T, V) in any float type; `targets` (B, T) int64, -1 = not counted. The softmax runs in fp32
    whatever the logits are: in bf16 the spacing near a loss of 8 would be 1/16 nat.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="sum"
    )


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each target in nats, (B, T) float32; 0 where the target is -1."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="none"
    )
    return losses.view_as(targets)
