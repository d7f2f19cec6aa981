"""Hugging Face GPT-2 folders, read without transformers: config.json and model.safetensors to a model of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from gpt2lab.config import ModelConfig
from gpt2lab.data.tokenizer import NUM_TOKENS
from gpt2lab.errors import CheckpointError
from gpt2lab.model import GPT, empty_model
from gpt2lab.target import HF_CONFIG as CONFIG
from gpt2lab.target import HF_WEIGHTS as WEIGHTS

PADDED_VOCABULARY = (
    50_304  # rows that our own GPT-2s have: NUM_TOKENS rounded up to a multiple of 64
)

# What we compute, in transformers' GPT2Config names: default where the file is silent, and what else means the same.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")  # causal masks that old files carry
_TRANSPOSED = re.compile(
    r"\.(c_attn|c_proj|c_fc)\.weight$"
)  # Conv1D keeps (in, out), Linear (out, in)


def load_hf(folder: Path) -> GPT:
    """Return the model of a Hugging Face GPT-2 folder, on the CPU in fp32.

    GPT-2's vocabulary gets padding rows up to 50304, each the mean of the real rows: their logit is then the average
    one, which a softmax over all rows hardly notices.

    Raises: CheckpointError naming the file and what it is instead.
    """
    config = read_hf_config(folder)
    tensors = _read_weights(folder / WEIGHTS)
    model = empty_model(config)
    wanted = dict(model.named_parameters())
    real = int(tensors["wte.weight"].size(0)) if "wte.weight" in tensors else 0
    missing, unknown = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or unknown:
        problem = f"no tensor {missing[0]}" if missing else f"unknown tensor {unknown[0]}"
        raise CheckpointError(f"{folder / WEIGHTS}: {problem}; not a GPT-2 of its {CONFIG}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            tensor = tensors[name]
            if name == "wte.weight" and real == NUM_TOKENS:
                padding = tensor.mean(dim=0, keepdim=True).expand(PADDED_VOCABULARY - real, -1)
                tensor = torch.cat([tensor, padding])
            if tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {name} is {tuple(tensor.shape)}, {CONFIG} means {tuple(parameter.shape)}"
                )
            parameter.copy_(tensor)
    return model


def read_hf_config(folder: Path) -> ModelConfig:
    """Return the shape that config.json describes.

    Raises: CheckpointError naming the first setting under which GPT-2 would be another network.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a Hugging Face model's {CONFIG}")
    if values.get("model_type") != "gpt2":
        raise CheckpointError(
            f"{path}: model_type {values.get('model_type')!r}, only 'gpt2' is read"
        )
    for name, allowed in _REQUIRED.items():
        found = values.get(name, allowed[0])
        if found not in allowed:
            raise CheckpointError(f"{path}: {name} {found!r} is not supported, only {allowed[0]!r}")
    try:
        n_layer, n_head, n_embd = (int(values[name]) for name in ("n_layer", "n_head", "n_embd"))
        context_length = int(values.get("n_positions") or values["n_ctx"])
        vocab_size = int(values["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: no usable {error}") from error
    if values.get("n_inner") not in (None, 4 * n_embd):
        raise CheckpointError(
            f"{path}: n_inner {values['n_inner']} is not supported, only 4 x n_embd"
        )
    return ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        context_length=context_length,
        vocab_size=PADDED_VOCABULARY if vocab_size == NUM_TOKENS else vocab_size,
    )


def our_name(name: str) -> str | None:
    """Return our name of a GPT-2 tensor, None for a causal mask, which is no weight."""
    if _BUFFERS.search(name):
        return None
    return re.sub(r"^h\.", "blocks.", name.removeprefix("transformer."))


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return {our parameter name: tensor in our layout}."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file; only unsplit safetensors weights are read (save_pretrained writes them)"
        )
    try:
        tensors = safetensors.torch.load_file(path, device="cpu")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    ours: dict[str, torch.Tensor] = {}
    for full_name, tensor in tensors.items():
        name = our_name(full_name)
        if name is None:
            continue
        ours[name] = tensor.T if _TRANSPOSED.search(name) else tensor
    head = ours.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, ours.get("wte.weight", head.new_empty(0))):
        raise CheckpointError(
            f"{path}: lm_head.weight differs from wte.weight; only a tied head is supported"
        )
    return ours
