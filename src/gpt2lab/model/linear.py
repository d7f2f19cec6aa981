"""A linear layer whose compiled GPU step sums the bias's gradient where the gradient of its output is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """torch's linear layer; compiled for a GPU, its backward pass reads less memory, and sums the bias in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, F)."""
        if torch.compiler.is_compiling() and x.is_cuda and x.dim() == 3:
            y: Tensor = SumsBiasByRow.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return y
        return super().forward(x)


class SumsBiasByRow(torch.autograd.Function):
    """A linear layer that sums the gradient of its bias over T, then over B.

    autograd sums B * T rows at once. Inductor splits so long a sum in a way that no longer fits the kernel which writes
    these rows (GELU's backward pass, the joining of q, k and v), and reads them from memory again; a sum over T fits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Map x (B, T, C), weight (F, C) and bias (F,) to (B, T, F)."""
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype), weight)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        """Return the gradients of x, of bias and, unless it is frozen, of weight."""
        x, weight = ctx.saved_tensors
        of_x = (slope @ weight.to(slope.dtype)).to(ctx.dtype)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (slope.flatten(0, 1).t() @ x.flatten(0, 1)).to(weight.dtype)
        return of_x, of_weight, slope.sum(1, dtype=torch.float32).sum(0)
