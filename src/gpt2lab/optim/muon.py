"""Muon and NorMuon: momentum with orthogonalized updates, for the matrices of the blocks, batched over equal shapes.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), Li et al. 2025 (arXiv:2510.05491). A test compares Muon with
torch.optim.Muon, which handles one matrix at a time, at the cost of a hundred small kernels a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# Rounds, and their coefficients of x, x^3 and x^5: `fast` is steep at 0, so few suffice; `exact` converges to 1.
NEWTON_SCHULZ = {"fast": (5, (3.4445, -4.7750, 2.0315)), "exact": (12, (2.0, -1.5, 0.5))}
MOMENTUM = 0.95
ROW_MOMENTUM = 0.95  # NorMuon's
_TINY = 1e-20  # for rows without a gradient


def orthogonalize(matrices: torch.Tensor, how: str = "fast") -> torch.Tensor:
    """Bring the singular values of matrices (n, rows, columns) near 1 by Newton-Schulz iterations.

    fast: those above 0.2 % of a matrix's Frobenius norm end between 0.68 and 1.21, smaller ones lower: 0.05 % ends
    at 0.24. exact: those above 0.1 % end within 1e-5 of 1. The matrices keep their dtype.
    """
    rounds, (a, b, c) = NEWTON_SCHULZ[how]
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices  # gram below has the shorter side
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(rounds):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # frees the old one's memory
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    A group's `parts` is the number of equally shaped matrices stacked in each of its parameters. By default the
    learning rate is comparable to AdamW's: an update of shape (r, c) is scaled by 0.2 sqrt(max(r, c)), to the size of
    AdamW's updates. Source: Liu et al. 2025 (Moonlight, arXiv:2502.16982), section 2.2. `adjust_lr` and
    `newton_schulz` of the groups, which must agree, are those of OptimConfig.

    With `even_rows` it is NorMuon: no neuron's weights move much further than another's. Each parameter's update keeps
    its norm, where modded-nanogpt keeps that of each matrix.

    Where the attribute `found_inf` is 1.0, a () tensor on the weights' device, a step leaves every bit of weights and
    state as it was, as AdamW's fused kernel does; nothing waits for the device.
    """

    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        even_rows: bool = False,
        gradient: Callable[[nn.Parameter], torch.Tensor | None] = lambda parameter: parameter.grad,
    ) -> None:
        defaults = {"adjust_lr": "match_rms_adamw", "newton_schulz": "fast"}
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "parts": 1, **defaults})
        self.even_rows = even_rows
        self._gradient = gradient
        self._rejected: torch.Tensor | None = None  # () bool of the step, if the device decides

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self._rejected = None if self.found_inf is None else self.found_inf.bool()
        by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if self._gradient(parameter) is not None:
                    shape = (parameter.size(0) // group["parts"], parameter.size(1))
                    by_shape.setdefault(shape, []).append((parameter, group))
        for (rows, columns), entries in by_shape.items():
            self._update(rows, columns, entries)

    def _update(
        self, rows: int, columns: int, entries: list[tuple[nn.Parameter, dict[str, Any]]]
    ) -> None:
        """Update the parameters whose matrices have one shape; memory is freed before the next shape."""
        parameters = [parameter for parameter, _ in entries]
        updates = self._orthogonal(parameters, rows, columns)
        if self.even_rows:
            for length in dict.fromkeys(map(len, parameters)):
                chosen = [i for i, parameter in enumerate(parameters) if len(parameter) == length]
                self._even_rows([parameters[i] for i in chosen], [updates[i] for i in chosen])
        scale = 0.2 * math.sqrt(max(rows, columns))
        if entries[0][1]["adjust_lr"] == "original":
            scale = math.sqrt(max(1, rows / columns))
        for (parameter, group), update in zip(entries, updates, strict=True):
            lr, decay = group["lr"], group["weight_decay"]
            weight = self._held(parameter)
            self._assign(weight, weight.mul(1 - lr * decay).add_(update, alpha=-lr * scale))

    def _assign(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Put new numbers into a tensor, unless the update is rejected: then they may be NaN."""
        if self._rejected is None:
            tensor.copy_(new)
        else:
            torch.where(self._rejected, tensor, new, out=tensor)

    def _orthogonal(
        self, parameters: list[nn.Parameter], rows: int, columns: int
    ) -> Sequence[torch.Tensor]:
        """Return the directions of parameters whose matrices have one shape, made orthogonal."""
        # bf16 suffices on a GPU; on a CPU fp32 costs little, and losses stay the same at any world size.
        dtype = torch.bfloat16 if parameters[0].is_cuda else torch.float32
        stack = torch.cat([self._direction(parameter) for parameter in parameters]).to(dtype)
        how = self.param_groups[0]["newton_schulz"]
        updates = orthogonalize(stack.view(-1, rows, columns), how).reshape(-1, columns)
        return torch.split(updates, [len(parameter) for parameter in parameters])

    def _even_rows(self, parameters: list[nn.Parameter], updates: Sequence[torch.Tensor]) -> None:
        """Divide the rows of updates of one shape by their norms, the roots of averages; each update keeps its norm.

        The averages begin at 0 and need no correction: a factor of all rows changes nothing.
        """
        norms = [
            torch.linalg.vector_norm(update, dim=1, dtype=torch.float32).square()
            for update in updates
        ]
        squares = self._all_rows(parameters, norms)
        held = []
        for parameter in parameters:
            if "row_squares" not in self.state[parameter]:
                self.state[parameter]["row_squares"] = torch.zeros_like(squares[0])
            held.append(self.state[parameter]["row_squares"])
        averages = torch.stack(held).lerp_(squares, 1 - ROW_MOMENTUM)
        for tensor, new in zip(held, averages.unbind(), strict=True):
            self._assign(tensor, new)
        average = averages.clamp(min=_TINY)
        size = squares.sum(1, True) / (squares / average).sum(1, True).clamp(min=_TINY)
        for update, factor in zip(updates, (size / average).sqrt().unbind(), strict=True):
            update.mul_(self._own_rows(factor)[:, None])

    def _all_rows(
        self, parameters: list[nn.Parameter], numbers: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return numbers (n, rows) of all rows of n parameters from those that this rank has of its own rows."""
        return torch.stack(numbers)

    def _own_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return those of a parameter's rows that this rank updates: all."""
        return numbers

    def _direction(self, parameter: nn.Parameter) -> torch.Tensor:
        """Add the gradient to the momentum, and return the Nesterov direction."""
        state, gradient = self.state[parameter], self._gradient(parameter)
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        held = self._held(state["momentum_buffer"])
        momentum = held.lerp(gradient, 1 - MOMENTUM)
        self._assign(held, momentum)
        return gradient.lerp(momentum, MOMENTUM)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds of a weight or its momentum: all of it."""
        return tensor
