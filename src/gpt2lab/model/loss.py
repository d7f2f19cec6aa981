"""Next-token cross-entropy, summed: the caller divides once, by the number of targets in the global batch.

Compiled steps use a fused form of head and loss that holds the logits once; all else uses the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

# Maps logits (N, V), which become their gradient, targets (N,) and the number of tokens to losses (N,).
Kernel: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]


def padding_bias(weight: Tensor, num_tokens: int) -> Tensor | None:
    """Return a bias (V,) for the logits of the head's `weight` (V, C) that removes padding rows from the softmax.

    Rows from `num_tokens` up are padding. None if there are none. Masking the logits themselves would hold them twice.
    """
    if weight.size(0) <= num_tokens:
        return None
    is_padding = torch.arange(weight.size(0), device=weight.device) >= num_tokens
    return torch.zeros(weight.size(0), device=weight.device).masked_fill(is_padding, -math.inf)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return c x / sqrt(x^2 + c^2) in fp32 for logits x of any shape, between -c and c; x itself if the cap is 0."""
    if not cap:
        return logits
    logits = logits.float()
    return cap * logits * (logits.square() + cap**2).rsqrt()


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed negative log-likelihood in nats, a float32 scalar.

    `logits` (B, T, V) in any float type; `targets` (B, T) int64, -1 = not counted. The softmax runs in fp32
    whatever the logits are: in bf16 the spacing near a loss of 8 would be 1/16 nat.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="sum"
    )


def head_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    num_tokens: int,
    bias: Tensor | None = None,
    cap: float = 0.0,
    kernel: Kernel | None = None,
) -> Tensor:
    """Return `cross_entropy_sum` of the masked logits of `hidden` (B, T, C) and `weight` (V, C), up to rounding.

    `bias` (V,) and `cap` are the head's; without them and with 16-bit logits, `kernel` may compute the loss.

    For compiled calls: uncompiled, it would hold several tensors as large as the logits.
    """
    rows, flat = hidden.flatten(0, 1), targets.flatten()
    total: Tensor = GradientInForward.apply(rows, weight, flat, num_tokens, bias, cap, kernel)  # type: ignore[no-untyped-call]
    return total


class GradientInForward(torch.autograd.Function):
    """Head and cross-entropy that compute the gradient of the logits in the forward pass.

    The loss is a sum, so this gradient is known up to one factor, which the backward pass applies to its small results.
    While a row of V logits is in the cache, the compiled loop takes its maximum and its exponentials once and writes
    the gradient; the plain form reads memory and takes the exponentials twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        num_tokens: int,
        bias: Tensor | None,
        cap: float,
        kernel: Kernel | None,
    ) -> Tensor:
        """Map hidden (N, C), weight (V, C) and targets (N,), -1 = not counted, to the loss, ()."""
        if kernel is not None:
            grad = F.linear(hidden, weight)  # logits (N, V), until the kernel
            losses = kernel(grad, targets, num_tokens)
            ctx.save_for_backward(hidden.to(grad.dtype), weight, grad, None)
            ctx.dtype = hidden.dtype
            return losses.sum()
        padding = padding_bias(weight, num_tokens)
        is_plain = bias is None and not cap
        # The mask is the product's bias: adding it to the logits would cost an instruction for each.
        logits = F.linear(hidden, weight, padding if is_plain else bias)  # (N, V)
        scores, target = soft_cap(logits, cap).float(), targets[:, None]
        if padding is not None and not is_plain:
            scores = scores + padding
        counted = target >= 0  # (N, 1)
        top = scores.amax(1, keepdim=True)
        powers = (scores - top).exp()
        total = powers.sum(1, keepdim=True)  # (N, 1)
        # Computed again, not read from the logits, so that the compiled gradient can reuse their memory.
        row = weight.to(logits.dtype)[targets.clamp(min=0)]  # (N, C)
        of_target = (hidden.to(logits.dtype).float() * row.float()).sum(1, keepdim=True)  # (N, 1)
        if bias is not None:
            of_target = of_target + bias[targets.clamp(min=0)][:, None]
        of_target = soft_cap(of_target, cap)
        losses = torch.where(counted, total.log() + top - of_target, 0.0)
        is_target = torch.arange(logits.size(1), device=logits.device) == target  # (N, V)
        grad = powers * torch.where(counted, 1 / total, 0.0) - is_target.float()
        if cap:  # the derivative of the cap
            grad = grad * (1 + (logits.float() / cap).square()).pow(-1.5)
        of_bias = None if bias is None else grad.sum(0)
        ctx.save_for_backward(hidden.to(logits.dtype), weight, grad.to(logits.dtype), of_bias)
        ctx.dtype = hidden.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        """Return the gradients of hidden and, unless they are frozen, weight and bias."""
        hidden, weight, grad, of_bias = ctx.saved_tensors
        of_bias = None if of_bias is None else of_bias * factor
        after: Tensor | float = factor
        if grad.dtype == torch.float16:  # its range is small: apply the loss scale before the sums
            grad, after = grad * factor, 1.0
        of_hidden = (grad @ weight.to(grad.dtype)).to(ctx.dtype) * after
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad.t() @ hidden).to(weight.dtype) * after
        return of_hidden, of_weight, None, None, of_bias, None, None


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target (...) in nats, float32; 0 where the target is -1.

    `logits` (..., V).
    """
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=-1, reduction="none"
    )
    return losses.view_as(targets)
