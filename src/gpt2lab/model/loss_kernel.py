"""Cross-entropy and the gradient of its logits in one Triton kernel, for CUDA. Only this module imports Triton.

torch.compile's kernel reads a row of logits twice and takes the exponentials twice, 58 instructions for each logit.
Here the row stays in registers: 1,024 threads hold it, one block on a multiprocessor.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from gpt2lab.config.schema import Dtype
from gpt2lab.errors import first_line
from gpt2lab.model.gpt import GPT
from gpt2lab.model.loss import token_losses

_BLOCK = 2048  # columns that the threads read at once, two each
MOST_COLUMNS = 25 * _BLOCK  # that 64 registers a thread hold
TOLERANCE = 2**-7  # of a loss in nats and of a gradient below 1, which bf16 rounds to 2**-9
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def cross_entropy_kernel(
    logits, targets, losses, V: tl.constexpr, num_tokens: tl.constexpr, B: tl.constexpr
):
    """Replace row `program_id` of logits (N, V) by its gradient, and write its loss to losses (N,)."""
    row = tl.program_id(0).to(tl.int64)  # N x V may be above 2**31
    logits += row * V
    columns = tl.arange(0, B)
    parts: tl.constexpr = (V + B - 1) // B  # tl.cdiv returns no constant in Triton 3.6
    kept = ()  # as they are stored: half the registers of fp32
    for i in tl.static_range(parts):
        is_token = columns + i * B < num_tokens
        kept = kept + (tl.load(logits + columns + i * B, mask=is_token, other=float("-inf")),)  # noqa: RUF005
    most = kept[0]
    for i in tl.static_range(1, parts):
        most = tl.maximum(most, kept[i])
    top = tl.max(most, 0).to(tl.float32)
    sums = tl.zeros((B,), tl.float32)
    for i in tl.static_range(parts):
        sums += tl.exp2((kept[i].to(tl.float32) - top) * _LOG2_E)
    total = tl.sum(sums, 0)
    target = tl.load(targets + row)
    is_counted = target >= 0
    has_score = is_counted & (target < num_tokens)
    of_target = tl.load(logits + target, mask=has_score, other=float("-inf")).to(tl.float32)
    tl.debug_barrier()  # all warps have read it before the first one replaces it
    tl.store(losses + row, tl.where(is_counted, top + tl.log(total) - of_target, 0.0))
    factor = tl.where(is_counted, 1 / total, 0.0)
    for i in tl.static_range(parts):
        grad = tl.exp2((kept[i].to(tl.float32) - top) * _LOG2_E) * factor
        tl.store(logits + columns + i * B, grad, mask=columns + i * B < V)
    tl.debug_barrier()  # the target's gradient is written after that of its column
    grad = tl.exp2((of_target - top) * _LOG2_E) * factor - 1
    tl.store(logits + target, grad, mask=has_score)


@library.triton_op("gpt2lab::cross_entropy_", mutates_args={"logits"})
def _operator(logits: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    launch = library.wrap_triton(cross_entropy_kernel)[(len(logits),)]
    V = logits.size(1)
    launch(logits, targets, losses, V, min(num_tokens, V), _BLOCK, num_warps=32)
    return losses


def cross_entropy_(logits: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
    """Return the losses (N,) float32 in nats of bf16 or fp16 `logits` (N, V), which become their gradient.

    `targets` (N,) int64, -1 = not counted. Columns from `num_tokens` up are padding: no part of the softmax.
    A function, not torch's operator, because fsdp copies the model that holds it.
    """
    losses: Tensor = _operator(logits, targets, num_tokens)
    return losses


def choose(model: GPT, dtype: Dtype) -> str | None:
    """Let the compiled loss of a model on a GPU use the kernel, if it can; return a warning if this card's is wrong."""
    config = model.config
    has_plain_head = config.head == "tied" and not config.logit_cap
    if dtype == "fp32" or not has_plain_head or config.vocab_size > MOST_COLUMNS:
        return None
    logits = torch.bfloat16 if dtype == "bf16" else torch.float16
    try:
        found = _error(model.wte.weight.device, config.vocab_size, config.id_limit, logits)
    except Exception as error:  # Triton's are of many kinds
        return f"loss kernel: {first_line(error)}; steps use the slower loss of torch.compile"
    if not found <= TOLERANCE:
        return f"loss kernel: off by {found:.1e} on this GPU; steps use the slower loss of torch.compile"
    model.loss_kernel = cross_entropy_
    return None


def _error(device: torch.device, V: int, num_tokens: int, dtype: torch.dtype) -> float:
    """Return the kernel's largest error against the plain loss, in a row's loss or its gradient."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(16, V, generator=generator, device=device).mul_(4).to(dtype)
    targets = torch.linspace(-1, min(num_tokens, V) - 1, 16, device=device).long()
    scores = logits.float()
    scores[:, num_tokens:] = -torch.inf
    expected = token_losses(scores, targets)
    gradient = scores.softmax(1) * (targets >= 0)[:, None]
    gradient[targets >= 0, targets[targets >= 0]] -= 1
    found = cross_entropy_(logits, targets, num_tokens)
    return max((found - expected).abs().max().item(), (logits - gradient).abs().max().item())
