"""Activation checkpointing: blocks that keep less for the backward pass and compute the rest again there.

Chen et al. 2016, arXiv:1604.06174. The numbers are the same bits, dropout included; only memory and time differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gpt2lab.config.schema import Recompute
from gpt2lab.model.gpt import GPT

_aten = torch.ops.aten
# What `selective` keeps: results of matrix products and attention. Norms, GELU and sums cost little to do again.
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def recompute_activations(model: GPT, mode: Recompute) -> None:
    """Have each block keep its input alone (`block`), or its matrix products besides (`selective`), in place."""
    if mode == "none":
        return
    how: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": model.config.dropout > 0,
    }
    if mode == "selective":
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    for block in model.blocks:
        block.forward = _recomputing(block.forward, how)


def _recomputing(
    forward: Callable[..., torch.Tensor], how: dict[str, Any]
) -> Callable[..., torch.Tensor]:
    def run(*args: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():  # evaluation and sampling keep nothing anyway
            return forward(*args)
        result: torch.Tensor = checkpoint(forward, *args, **how)
        return result

    return run
