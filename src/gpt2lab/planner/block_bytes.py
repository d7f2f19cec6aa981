"""Bytes that a block holds of each channel of a token, and what each option of the model adds to GPT-2's. No torch.

Counted on the uncompiled model on a CPU, where torch makes RMSNorm of several small steps that each keep something; one
kernel does it on a GPU, which should keep less.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt2lab.config.schema import ModelConfig


@dataclass(frozen=True)
class BlockBytes:
    """What a block keeps for its backward, and what it holds at moments of it; bytes a channel of a token."""

    saved: int
    saved_per_token: int  # of all channels: attention's logsumexp, statistics of norms
    square: int  # backward of ReLU squared, beyond `saved`; 0 for GELU: the matrix product before it holds more
    attention: int  # in all, when the gradients of queries, keys and values come
    into_qkv: int  # in all, when the gradient of their weight is there
    norm: int  # in all, in a norm's backward
    last_norm: int  # input and output of the norm before the head
    last_norm_per_token: int


def count_block_bytes(model: ModelConfig, *, bf16: bool, frozen: bool) -> BlockBytes:
    """Count a block of this model; `frozen`: its weights have no gradient, adapters beside them do."""
    H = model.n_head
    # GPT-2: two norms' inputs and outputs, qkv, attention, fc, GELU; mean and deviation of two norms.
    saved, per_token = (36 if bf16 else 64), 4 * H + 16
    attention, into_qkv = (26, 16) if bf16 else (44, 24)
    norm, last_norm, last_norm_per_token = 12, (6 if bf16 else 8), 8
    if model.positions == "rotary" or model.qk_norm == "rmsnorm":
        # Queries and keys beside qkv. Attention's result is laid out like them, so that joining heads is a copy.
        saved += (4 if bf16 else 8) + (0 if H == 1 else 2 if bf16 else 4)
        attention += 4 if bf16 else 8
    if model.qk_norm == "rmsnorm":
        # Queries and keys divided by their size, and the sizes; under autocast also what was divided, in fp32.
        saved += 16 if bf16 else 8
        attention += 16 if bf16 else 8
        per_token += 8 * H
    if model.norm == "rmsnorm":  # what is divided by its size, before the gain; and no mean
        saved += 8
        per_token -= 8
        attention += 4
        into_qkv += 4
        norm, last_norm, last_norm_per_token = 24, last_norm + 4, 4
    if frozen:  # a gain without gradient needs no input of its own
        saved -= 8 * (model.norm == "rmsnorm") + 8 * (model.qk_norm == "rmsnorm")
        last_norm -= 4 * (model.norm == "rmsnorm")
    square = 0
    if model.activation == "relu2":  # the incoming gradient, and the derivative in three steps
        square = 28 if bf16 else 52
    return BlockBytes(
        saved=saved,
        saved_per_token=per_token,
        square=square,
        attention=attention,
        into_qkv=into_qkv,
        norm=norm,
        last_norm=last_norm,
        last_norm_per_token=last_norm_per_token,
    )
