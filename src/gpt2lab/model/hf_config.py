"""Hugging Face's config.json of a GPT-2, read and written. No torch, no transformers."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from gpt2lab.config.schema import ModelConfig
from gpt2lab.errors import CheckpointError, DataError
from gpt2lab.files import SIZE, JsonFile
from gpt2lab.model.weights_header import check_shapes, read_shapes
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from gpt2lab.tokenizers.opening import find_in

HF_CONFIG, HF_WEIGHTS = "config.json", "model.safetensors"
PADDED_VOCABULARY = 50_304  # rows of our own GPT-2s: NUM_TOKENS rounded up to a multiple of 64

# Our network in transformers' GPT2Config names: the default where the file says nothing, then equivalent values.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")  # causal masks that old files carry


def our_name(name: str) -> str | None:
    """Return our name of a GPT-2 tensor, None for a causal mask, which is no weight."""
    if _BUFFERS.search(name):
        return None
    return re.sub(r"^h\.", "blocks.", name.removeprefix("transformer."))


def read_hf_config(folder: Path) -> ModelConfig:
    """Return the shape that config.json describes.

    Raises: CheckpointError naming the first setting under which GPT-2 would be another network.
    """
    file = JsonFile(folder / HF_CONFIG, CheckpointError)
    path, values = file.path, file.read()
    if values.get("model_type") != "gpt2":
        raise CheckpointError(
            f"{path}: model_type {values.get('model_type')!r}, only 'gpt2' is read"
        )
    for name, allowed in _REQUIRED.items():
        found = values.get(name, allowed[0])
        if found not in allowed:
            raise CheckpointError(f"{path}: {name} {found!r} is not supported, only {allowed[0]!r}")
    positions = "n_positions" if values.get("n_positions") else "n_ctx"
    sizes = ("n_layer", "n_head", "n_embd", positions, "vocab_size")
    file.check(values, dict.fromkeys(sizes, SIZE))
    n_layer, n_head, n_embd, context_length, vocab_size = (values[name] for name in sizes)
    if n_embd % n_head:
        raise file.rejected(f"n_embd {n_embd} is not a multiple of n_head {n_head}")
    if values.get("n_inner") not in (None, 4 * n_embd):
        raise CheckpointError(
            f"{path}: n_inner {values['n_inner']} is not supported, only 4 x n_embd"
        )
    if not (folder / HF_WEIGHTS).exists():
        raise CheckpointError(
            f"{folder / HF_WEIGHTS}: no such file; only unsplit safetensors weights are read "
            "(save_pretrained writes them)"
        )
    shapes = {our_name(n) or "": shape for n, shape in read_shapes(folder / HF_WEIGHTS).items()}
    own = None
    with contextlib.suppress(DataError):  # weights need no tokenizer
        own = find_in(folder)
    # Without a tokenizer beside them, rows that suit GPT-2's are GPT-2's.
    num_tokens = NUM_TOKENS if vocab_size <= PADDED_VOCABULARY else vocab_size
    config = ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        context_length=context_length,
        vocab_size=PADDED_VOCABULARY if vocab_size == NUM_TOKENS else vocab_size,
        num_tokens=num_tokens if own is None else own.size,
    )
    check_shapes(folder / HF_WEIGHTS, shapes, config, rows=vocab_size)
    return config


def write_hf_config(
    config: ModelConfig, folder: Path, *, dtype: str, end_of_text: int | None
) -> None:
    """Write config.json for a model without padding rows; dropout is 0, for inference."""
    values = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")},
        "n_positions": config.context_length,
        "n_ctx": config.context_length,  # its old name, which lm-eval and older readers still ask for
        "n_inner": None,
        "vocab_size": config.id_limit,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
    }
    values |= {name: allowed[0] for name, allowed in _REQUIRED.items()}
    (folder / HF_CONFIG).write_text(json.dumps(values, indent=2) + "\n")
