"""Activation checkpointing: blocks keep fewer activations and recompute the rest in the backward pass.

Chen et al. 2016, arXiv:1604.06174. Results are bit-identical, dropout included; only memory and time differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gpt2lab.config.schema import ActivationCheckpointing
from gpt2lab.model.gpt import GPT

# `selective` keeps the results of matrix products and attention; norms, GELU and sums cost little to recompute.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
_KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (*_PRODUCTS, *(f"_scaled_dot_product_{kernel}" for kernel in _ATTENTION))
]


def apply_activation_checkpointing(model: GPT, mode: ActivationCheckpointing) -> None:
    """Make each block keep only its input (`block`), or also its matrix products (`selective`), in place."""
    if mode == "none":
        return
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": model.config.dropout > 0,
    }
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    for block in model.blocks:
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(
    forward: Callable[..., torch.Tensor], options: dict[str, Any]
) -> Callable[..., torch.Tensor]:
    def run(*args: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():  # evaluation and sampling keep nothing anyway
            return forward(*args)
        result: torch.Tensor = checkpoint(forward, *args, **options)
        return result

    return run
