"""What torch.compile makes of a training step: one graph, or one for each kind of a deep model's parts.

In place either way: no _orig_mod. in parameter names. Only the training call is compiled; evaluation and sampling call
`model.hidden` and `model.head` without gradients, and never make the step compile again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpt2lab.model.gpt import GPT


def compile_step(model: GPT, trained: nn.Module, *, by_region: bool) -> None:
    """Compile the forward pass of `trained`, which is the model or contains it, and so its backward pass.

    `by_region`: embeddings, each block, and head with loss apart. All blocks share one compiled region.
    """
    from torch._dynamo import config as dynamo_config  # slow; evaluation compiles nothing
    from torch._inductor import config as inductor_config

    # Inductor reads the environment only when it is imported: before a run is known.
    # Compiled GELUs of a CPU take half the time with tanh written as an exponential. It is off by default for its
    # relative error near 0, which 1 + tanh does not see.
    inductor_config.cpp.use_decompose_tanh = True
    # Inductor otherwise times kernels, some of which add in another order, and takes the fastest.
    inductor_config.deterministic = torch.are_deterministic_algorithms_enabled()
    # DDP's compiler cuts one graph where a bucket is full, so that gradients travel early; regions are cut already.
    dynamo_config.optimize_ddp = not by_region
    if not by_region:
        trained.compile()
        return
    model.embed = _region(model.embed)  # type: ignore[method-assign]
    for block in model.blocks:
        block.forward = _region(block.forward)
    model.loss_sum = _region(model.loss_sum)  # type: ignore[method-assign]


def _region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled where gradients are computed."""
    compiled = torch.compile(function)

    def run(*args: Any) -> Any:
        return compiled(*args) if torch.is_grad_enabled() else function(*args)

    return run
