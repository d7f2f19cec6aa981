"""Hugging Face's weights, read without transformers; interop/export.py writes them.

GPT-2's are called transformer.h.0... and have transposed matrices. Those of our own model type are called
model.blocks.0... and are ours unchanged.
"""

from __future__ import annotations

import re
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from gpt2lab.errors import CheckpointError
from gpt2lab.model.gpt import GPT, empty_model
from gpt2lab.model.hf_config import (
    HF_CONFIG,
    PADDED_VOCABULARY,
    our_name,
    read_hf_config,
    weight_files,
)
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS

OF_THE_VOCABULARY = ("wte.weight", "lm_head.weight", "lm_head.bias")  # a row for each id
# GPT-2's: Conv1D (in, out), ours: Linear (out, in).
TRANSPOSED = re.compile(r"^(transformer\.)?h\..*\.(c_attn|c_proj|c_fc)\.weight$")


def load_hf(folder: Path) -> GPT:
    """Return the model of a Hugging Face folder, on the CPU in fp32.

    GPT-2's vocabulary gets padding rows up to 50304, each the mean of the real rows: their logit is then the average
    one, which a softmax over all rows hardly notices.

    Raises: CheckpointError naming the file and what it is instead.
    """
    config, tensors = read_hf_config(folder), _read_weights(folder)
    path = weight_files(folder)[0]
    if config.head == "tied":
        head = tensors.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, tensors.get("wte.weight", head.new_empty(0))):
            raise CheckpointError(
                f"{path}: lm_head.weight differs from wte.weight, and the head is tied"
            )
    model = empty_model(config)
    wanted = dict(model.named_parameters())
    real = int(tensors["wte.weight"].size(0)) if "wte.weight" in tensors else 0
    missing, unknown = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or unknown:
        problem = f"no tensor {missing[0]}" if missing else f"unknown tensor {unknown[0]}"
        raise CheckpointError(f"{path}: {problem}; not a GPT-2 of its {HF_CONFIG}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            tensor = tensors[name]
            if name in OF_THE_VOCABULARY and real == NUM_TOKENS:
                mean = tensor.mean(dim=0, keepdim=True)
                tensor = torch.cat([tensor, mean.expand(PADDED_VOCABULARY - real, *mean.shape[1:])])
            if tensor.shape != parameter.shape:
                found, meant = tuple(tensor.shape), tuple(parameter.shape)
                raise CheckpointError(f"{path}: {name} is {found}, {HF_CONFIG} means {meant}")
            parameter.copy_(tensor)
    return model


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return {our parameter name: tensor in our layout}."""
    ours: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors = safetensors.torch.load_file(path, device="cpu")
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cut short or damaged ({error}); copy or download it again"
            ) from error
        for full_name, tensor in tensors.items():
            name = our_name(full_name)
            if name is None:
                continue
            ours[name] = tensor.T if TRANSPOSED.search(full_name) else tensor
    return ours
