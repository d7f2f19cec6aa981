"""Which of torch's attention kernels a GPU runs: choose one by name, and observe which one it is.

torch takes the first of its kernels that supports a call, in an order that depends on the card, the cuDNN library and
the environment, and does not report it. So before training, attention runs once forward and backward, with the run's
own shapes and dtype, and the operators that torch dispatches to are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2lab.config.schema import AttentionBackend
from gpt2lab.errors import ConfigError
from gpt2lab.model.gpt import GPT, Block, rotary_angles

_BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_OPERATOR = re.compile(
    r"aten::_scaled_dot_product_(cudnn|flash|efficient)_attention(_for_cpu)?"  # the forward pass's
)
_for_good = contextlib.ExitStack()  # a choice holds until the process ends


def choose(
    wanted: AttentionBackend,
    model: GPT,
    *,
    micro_batch: int,
    masked: bool,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Make torch try the wanted kernel first, and return the one that the training step runs.

    `masked`: the step passes an attention mask, as for packed rows. Calls of evaluation and sampling that the kernel
    does not support still use torch's other kernels. The compile cache's key gets the kernel's name, which torch's own
    key lacks.

    Raises: ConfigError if another kernel runs than the one wanted, or if attention fails.
    """
    B, T, D = micro_batch, model.config.context_length, model.config.n_embd // model.config.n_head
    observe = functools.partial(
        backend_that_runs, model, micro_batch=B, masked=masked, autocast=autocast
    )
    shape = f"B {B}, H {model.config.n_head}, T {T}, D {D}"
    try:
        found = observe()
        if wanted not in ("auto", found):
            # Only now: at the first call torch sets an order of its own, over any set before.
            order = [_BACKENDS[wanted], *(b for name, b in _BACKENDS.items() if name != wanted)]
            _for_good.enter_context(sdpa_kernel(order, set_priority=True))
            found = observe()
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


def why_not_cudnn(found: str) -> str | None:
    """Return why a GPU that is fastest with cuDNN's attention runs flash, with cost and fix; None if it does not.

    torch tries cuDNN's first from 9.15.1 on (before, it erred for lengths that 128 does not divide; pytorch#169849), on
    Hopper and Blackwell. The wheels for CUDA 12 bring an older one.
    """
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    if torch.are_deterministic_algorithms_enabled():  # which excludes it
        return None
    if found != "flash" or torch.cuda.get_device_capability()[0] not in (9, 10) or version > 91500:
        return None
    cuda = (torch.version.cuda or "12").partition(".")[0]
    return (
        f"attention flash: steps take about 5 to 12 % longer than with cudnn, which torch runs from cuDNN 9.15.1 on, "
        f"and this is {version // 10000}.{version // 100 % 100}.{version % 100}; "
        f"pip install 'nvidia-cudnn-cu{cuda}>=9.15.1'"
    )


def for_changing_shapes() -> AbstractContextManager[None]:
    """Avoid cuDNN's kernel within the context: it builds a plan for each new shape, so for each new token."""
    return sdpa_kernel([backend for name, backend in _BACKENDS.items() if name != "cudnn"])


def backend_that_runs(
    model: GPT,
    *,
    micro_batch: int,
    masked: bool,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Return the kernel that the first block's attention runs, forward and backward.

    Raises: RuntimeError if no kernel supports it, or the backward pass runs another one.
    """
    config, T = model.config, model.config.context_length
    attention, device = cast(Block, model.blocks[0]).attn, model.wte.weight.device
    x = torch.zeros(micro_batch, T, config.n_embd, device=device, requires_grad=True)
    mask, rotation = None, None
    if masked:
        mask = torch.ones(micro_batch, T, T, dtype=torch.bool, device=device).tril()
    if config.positions != "learned":
        rotation = rotary_angles(torch.arange(T, device=device), config)
    with _Operators() as ran:
        with autocast():
            y = attention(x, mask, None, rotation)
        torch.autograd.grad(y.sum(), x)
    forward = [match for name in ran.names if (match := _OPERATOR.fullmatch(name))]
    if not forward:
        return "math"  # plain products and a softmax, no operator of its own
    [operator] = forward
    if f"{operator[0]}_backward" not in ran.names:
        raise RuntimeError(f"the forward pass is {operator[1]}'s, the backward pass is not")
    return operator[1]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of the operators that run within, also in the backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))
