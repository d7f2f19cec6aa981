"""Scaled dot-product attention: torch's own, and a form of it that CPUs compute faster in bf16."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

# Above, keeping the (T, T) weights of all layers for the backward pass takes more memory than it is worth.
_MATMUL_UP_TO = 512


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Map queries (B, H, T, D), keys and values (B, H, S, D) to (B, H, T, D).

    Position t sees positions up to t, or where `allowed` (B, 1, T, S) is true. Which of the two ways computes it
    depends on device, precision and length alone; both give the same up to rounding.
    """
    is_plain = allowed is None and dropout == 0.0 and q.size(2) == k.size(2) <= _MATMUL_UP_TO
    if is_plain and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return causal_by_matmul(q, k, v)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=allowed is None, dropout_p=dropout
    )


def causal_by_matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of (B, H, T, D) as two batched products around a softmax.

    On CPUs torch's flash kernel runs outside the library that multiplies bf16 matrices in hardware, this does not:
    a third of the time at T = 256.
    """
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    unseen = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(unseen, q, k.transpose(1, 2), alpha=1 / math.sqrt(D))  # (B * H, T, T)
    return torch.bmm(scores.softmax(dim=-1), v).view(B, H, T, D)
