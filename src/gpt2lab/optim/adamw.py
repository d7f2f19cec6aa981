"""torch's AdamW, started without torch.compile's tracer.

torch._dynamo takes longer to import than the rest of an uncompiled start, and torch.optim imports it at the first call
of several methods, to mark them as not to be traced. No optimizer here is ever traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw


class AdamW(torch.optim.AdamW):
    """The same arithmetic, groups and state; `step` calls the same function.

    The fused kernel changes nothing where the attribute `found_inf` is 1.0, a () tensor on the weights' device, as
    torch.amp.GradScaler sets it. The step counts stay too.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            tensors: list[list[torch.Tensor]] = [[], [], [], [], []]
            weights, gradients, means, squares, steps = tensors
            self._init_group(group, weights, gradients, means, squares, [], steps)  # type: ignore[no-untyped-call]
            self.update(group, *tensors)

    def update(self, group: dict[str, Any], *tensors: list[torch.Tensor]) -> None:
        """Update weights and moments in place with the settings of their group.

        `tensors`: weights, gradients, means, mean squares, and counts of steps, each ().
        """
        weights, gradients, means, squares, steps = tensors
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            gradients,
            means,
            squares,
            [],
            steps,
            fused=group["fused"],
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def skip_tracer() -> None:
    """Keep methods of torch.optim.Optimizer from importing the tracer; call this before an optimizer is made.

    Their wrapper looks for this attribute before it imports the tracer (torch/_compile.py). With a torch that looks
    for another, starts only take longer.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None and "torch._dynamo" not in sys.modules:
            setattr(method, "__dynamo_disable", method)
