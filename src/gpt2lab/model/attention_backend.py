"""Which of torch's attention kernels a GPU runs: chosen by name, and looked at instead of believed.

torch takes the first of its kernels that can do a call, in an order that depends on the card, the cuDNN library and the
environment, and says nothing about it. So attention is run once before the run begins, forward and backward, with the
run's own shapes and dtype, and the operators that it ends in are read off.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2lab.config.schema import AttentionBackend
from gpt2lab.errors import ConfigError
from gpt2lab.model.gpt import GPT, Block, rotation_of

_BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_OPERATORS = {
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
}
_for_good = contextlib.ExitStack()  # a choice holds until the process ends


def choose(
    wanted: AttentionBackend,
    model: GPT,
    *,
    micro_batch: int,
    masked: bool,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Have torch try the wanted kernel first, and return the one that the training step runs.

    `masked`: the step says who sees whom, as for packed rows. Calls that the kernel cannot do, of evaluation and of
    sampling, still fall to torch's others. Compiled steps are kept in the
    cache apart by kernel, as torch's own key does not tell them apart.

    Raises: ConfigError if another kernel runs than the one wanted, or if attention fails.
    """
    B, T, D = micro_batch, model.config.context_length, model.config.n_embd // model.config.n_head
    look = functools.partial(
        backend_that_runs, model, micro_batch=B, masked=masked, autocast=autocast
    )
    shape = f"B {B}, H {model.config.n_head}, T {T}, D {D}"
    try:
        found = look()
        if wanted not in ("auto", found):
            # Only now: torch sets an order of its own at the first call, over one that was set before.
            _for_good.enter_context(sdpa_kernel(_order(wanted), set_priority=True))
            found = look()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"attention {wanted}: fails for {shape} ({reason}); try another, --attention flash or efficient"
        ) from error
    if wanted not in ("auto", found):
        raise ConfigError(
            f"attention {wanted}: cannot do {shape} with this dtype, card and --deterministic, torch runs {found}; "
            f"use --attention {found} or auto"
        )
    tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = f"{tag} attention {found}".strip()
    return found


def backend_that_runs(
    model: GPT,
    *,
    micro_batch: int,
    masked: bool,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Return the kernel that the first block's attention ends in, forward and backward.

    Raises: RuntimeError if none can, or the backward pass is another kernel's.
    """
    config, T = model.config, model.config.context_length
    attention, device = cast(Block, model.blocks[0]).attn, model.wte.weight.device
    x = torch.zeros(micro_batch, T, config.n_embd, device=device, requires_grad=True)
    mask, rotation = None, None
    if masked:
        mask = torch.ones(micro_batch, T, T, dtype=torch.bool, device=device).tril()
    if config.positions == "rotary":
        positions = torch.arange(T, device=device)
        rotation = rotation_of(positions, config.n_embd // config.n_head)
    with _Operators() as seen:
        with autocast():
            y = attention(x, mask, None, rotation)
        torch.autograd.grad(y.sum(), x)
    forward = [(name, operator) for operator, name in _OPERATORS.items() if operator in seen.names]
    if not forward:
        return "math"  # plain products and a softmax, no operator of its own
    [(name, operator)] = forward
    if f"{operator}_backward" not in seen.names:
        raise RuntimeError(f"the forward pass is {name}'s, the backward pass is not")
    return name


def _order(first: str) -> list[SDPBackend]:
    return [_BACKENDS[first], *(other for name, other in _BACKENDS.items() if name != first)]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of the operators that run within, those of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))
