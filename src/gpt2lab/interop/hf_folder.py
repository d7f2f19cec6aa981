"""Weights and settings of ours as transformers reads them: its names, its layout, its config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from gpt2lab.config.schema import ModelConfig
from gpt2lab.config.settings import OPTIONS
from gpt2lab.model.gpt import GPT
from gpt2lab.model.hf_config import (
    GPT2,
    GPT2LAB,
    HF_CONFIG,
    REQUIRED,
    model_type_of,
    required_of_ours,
)
from gpt2lab.model.hf_weights import OF_THE_VOCABULARY, TRANSPOSED


def hf_tensors(model: GPT, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return {transformers' name: tensor in its layout} without padding rows; the tied head appears once."""
    tensors = {}
    is_gpt2 = model_type_of(model.config) == GPT2
    for full_name, parameter in model.named_parameters():
        name = full_name if full_name.startswith("lm_head.") else f"model.{full_name}"
        if is_gpt2:
            name = "transformer." + re.sub(r"^blocks\.", "h.", full_name)
        tensor = parameter.detach()
        if full_name in OF_THE_VOCABULARY:
            tensor = tensor[: model.config.id_limit].clone()  # without the memory of the rest
        if TRANSPOSED.search(name):
            tensor = tensor.T
        tensors[name] = tensor.to("cpu", dtype).contiguous()
    return dict(sorted(tensors.items()))


def write_hf_config(
    config: ModelConfig, folder: Path, *, dtype: str, end_of_text: int | None
) -> None:
    """Write config.json for a model without padding rows; dropout is 0, for inference."""
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    common = {
        "vocab_size": config.id_limit,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
    }
    values: dict[str, Any]
    if model_type_of(config) == GPT2:
        values = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": GPT2,
            **sizes,
            "n_positions": config.context_length,
            "n_ctx": config.context_length,  # its old name, which lm-eval and older readers still ask for
            "n_inner": None,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **common,
            **{name: allowed[0] for name, allowed in REQUIRED.items()},
        }
    else:
        values = {
            "architectures": ["GPT2LabForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_gpt2lab.GPT2LabConfig",
                "AutoModel": "modeling_gpt2lab.GPT2LabModel",
                "AutoModelForCausalLM": "modeling_gpt2lab.GPT2LabForCausalLM",
            },
            "model_type": GPT2LAB,
            **sizes,
            "context_length": config.context_length,
            **{name: getattr(config, name) for name in OPTIONS},
            "dropout": 0.0,
            **common,
            **{name: allowed[0] for name, allowed in required_of_ours(config.head).items()},
        }
    (folder / HF_CONFIG).write_text(json.dumps(values, indent=2) + "\n")
