"""Write weights as a GGUF file for llama.cpp, as its own convert_hf_to_gguf.py writes a GPT-2, and read it back.

Names, layout and types are those of llama.cpp's architecture `gpt2`: matrices (out, in) as ours, the head is the
embedding, vectors and positions stay fp32 whatever the type of the matrices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gpt2lab import __version__
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.config.schema import ModelConfig
from gpt2lab.config.settings import options_of
from gpt2lab.errors import CheckError, ConfigError, SaveError, system_errors_as
from gpt2lab.files import staged_new_file
from gpt2lab.model.gpt import GPT
from gpt2lab.runs.target import Target, was_tuned
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.huggingface import splits_as_gpt2
from gpt2lab.tokenizers.interface import Tokenizer, byte_alphabet
from gpt2lab.tokenizers.opening import why_no_text

GgufDtype = Literal["float32", "float16", "q8_0"]
# By our name: llama.cpp's name, the values as they are stored, and gguf's type.
_Stored = dict[str, tuple[str, np.ndarray, Any]]
_TYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}  # GGMLQuantizationType
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_BLOCK = 32  # values of a row that share a scale in q8_0


def export_gguf(
    target: Target, *, out: Path, dtype: GgufDtype
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write the weights and the tokenizer of `target` to the new file `out`; it appears complete and checked.

    Returns: the numbers, as --json prints them, and warnings. `max_abs_diff` is the error of the type: the largest
    difference between the logits of the file's weights and of the run's, both in our model.

    Raises: ConfigError, CheckpointError or DataError before anything is written; CheckError if what is read back is
    not what was written; SaveError.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"--format gguf needs the gguf package (the extra `gguf`): pip install gguf ({error})"
        ) from error
    if out.exists():
        raise ConfigError(f"{out}: exists already; choose another --out")
    if out.suffix != ".gguf":
        raise ConfigError(f"--out {out}: name a file that ends with .gguf")
    shape, tokenizer = target.model_config(), target.tokenizer()
    if problem := _why_not(shape, tokenizer, dtype):
        raise ConfigError(f"{target.name} cannot be exported as GGUF: {problem}")
    assert tokenizer is not None
    model = load_weights(target).eval()
    metadata = _metadata(gguf, target, tokenizer, dtype)
    tensors = _tensors(gguf, model, dtype)
    with system_errors_as(SaveError, out, fix="choose another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with staged_new_file(out) as temporary:
            _write(gguf, temporary, metadata, tensors)
            faultpoint("export.weights", 0)
            max_abs_diff, max_abs_logit = _check(gguf, temporary, model, metadata, tensors)
            faultpoint("export.before_rename", 0)
    padding = (shape.vocab_size - shape.id_limit) * shape.n_embd
    numbers = {
        "out": str(out),
        "max_abs_diff": max_abs_diff,
        "max_abs_logit": max_abs_logit,
        "parameters": sum(parameter.numel() for parameter in model.parameters()) - padding,
        "dtype": dtype,
    }
    return numbers, target.warnings


def _why_not(shape: ModelConfig, tokenizer: Tokenizer | None, dtype: GgufDtype) -> str | None:
    """Say why llama.cpp could not compute the same; None if it can."""
    if options := options_of(shape):
        return f"{options}; llama.cpp's GPT-2 does not have these layers; use --format transformers"
    if problem := why_no_text(tokenizer, shape.vocab_size):
        return f"llama.cpp needs a tokenizer, but {problem}"
    assert tokenizer is not None
    if not _is_llama_cpps(json.loads(tokenizer.tokenizer_json())):
        return (
            f"llama.cpp would tokenize text differently from {tokenizer.title}: it supports GPT-2's tokenizer, or a "
            f"byte-level BPE that splits words as GPT-2 does"
        )
    if dtype == "q8_0" and shape.n_embd % _BLOCK:
        return f"q8_0 needs n_embd to be a multiple of {_BLOCK}, but it is {shape.n_embd}; use --dtype float16"
    return None


def _is_llama_cpps(values: dict[str, Any]) -> bool:
    """Tell whether a tokenizer.json is what llama.cpp computes for model `gpt2`, pre-tokenizer `gpt-2`."""
    model = values["model"]
    other = ("byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model.get("type") == "BPE"
        and bool(model.get("merges"))
        and not any(model.get(name) for name in other)
        and splits_as_gpt2(values)
        and set(byte_alphabet()) <= set(model["vocab"])
    )


def _metadata(gguf: Any, target: Target, tokenizer: Tokenizer, dtype: GgufDtype) -> dict[str, Any]:
    """Return the file's keys and values: text, truth value, whole number, number, or a list of these."""
    shape, run = target.model_config(), target.folder.name
    source = "a Hugging Face folder"
    if target.checkpoint is not None:
        run = target.folder.parent.name
        source = f"step {target.checkpoint.step} of the run {run}"
    values = json.loads(tokenizer.tokenizer_json())
    names = {id: token for token, id in values["model"]["vocab"].items()}
    special = {one["id"]: one["content"] for one in values.get("added_tokens") or ()}
    normal, control, unused = (
        int(gguf.TokenType[name]) for name in ("NORMAL", "CONTROL", "UNUSED")
    )
    names = {id: f"[PAD{id}]" for id in range(shape.id_limit)} | names | special
    kinds = dict.fromkeys(range(shape.id_limit), unused)
    kinds |= dict.fromkeys(values["model"]["vocab"].values(), normal)
    kinds |= dict.fromkeys(special, control)
    merges = values["model"]["merges"]
    metadata = {
        "general.type": "model",
        "general.name": run,
        "general.description": f"{source}, exported by gpt2lab {__version__}",
        "general.file_type": int(gguf.LlamaFileType[_FILE_TYPES[dtype]]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "gpt2.block_count": shape.n_layer,
        "gpt2.context_length": shape.context_length,
        "gpt2.embedding_length": shape.n_embd,
        "gpt2.feed_forward_length": 4 * shape.n_embd,
        "gpt2.attention.head_count": shape.n_head,
        "gpt2.attention.layer_norm_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [names[id] for id in range(shape.id_limit)],
        "tokenizer.ggml.token_type": [kinds[id] for id in range(shape.id_limit)],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": tokenizer.end_of_text,
        "tokenizer.ggml.eos_token_id": tokenizer.end_of_text,
        "tokenizer.ggml.add_bos_token": False,
    }
    if was_tuned(target):
        metadata["tokenizer.chat_template"] = chat_template.jinja(tokenizer.end_token)
    return metadata


def _tensors(gguf: Any, model: GPT, dtype: GgufDtype) -> _Stored:
    # By transformers' names: transformer.h.3.attn.c_attn.bias -> blk.3.attn_qkv.bias.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, model.config.n_layer)
    stored = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if name == "wte.weight":
            values = values[: model.config.id_limit]  # without padding rows
        is_matrix = values.dim() == 2 and name != "wpe.weight"
        kind = gguf.GGMLQuantizationType[_TYPES[dtype if is_matrix else "float32"]]
        theirs = names.get_name(
            "transformer." + name.replace("blocks.", "h."), try_suffixes=(".weight", ".bias")
        )
        stored[name] = theirs, gguf.quants.quantize(values.contiguous().numpy(), kind), kind
    return stored


def _write(gguf: Any, path: Path, metadata: dict[str, Any], tensors: _Stored) -> None:
    writer = gguf.GGUFWriter(path, "gpt2")
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(
            key, value, gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
        )
    for name, values, kind in tensors.values():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(
    gguf: Any, path: Path, model: GPT, metadata: dict[str, Any], tensors: _Stored
) -> tuple[float, float]:
    """Compare the file with what was to be written, and load its weights into the model.

    Returns: the largest difference of the logits of one text of random ids, as long as the context, and the largest
    logit.
    """
    reader = gguf.GGUFReader(path)
    for key, value in metadata.items():
        field = reader.get_field(key)
        found = None if field is None else field.contents()
        if found != (np.float32(value) if isinstance(value, float) else value):
            raise CheckError(f"export discarded: gguf reads back another value of {key}")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, values, kind in tensors.values():
        found = stored.pop(name, None)
        if found is None or found.tensor_type != kind or not np.array_equal(found.data, values):
            raise CheckError(f"export discarded: gguf reads back another tensor {name}")
    if stored:
        raise CheckError(f"export discarded: gguf reads back an additional tensor {min(stored)}")
    real, length = model.config.id_limit, model.config.context_length
    ids = torch.randint(0, real, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids)[..., :real]
        for full_name, parameter in model.named_parameters():
            _, values, kind = tensors[full_name]
            restored = torch.from_numpy(gguf.quants.dequantize(values, kind))
            parameter[: len(restored)].copy_(restored)
        found = model(ids)[..., :real]
    difference = (found - expected).abs().max().item()
    if not np.isfinite(difference):
        raise CheckError("export discarded: the weights overflow this type; use --dtype float32")
    return difference, expected.abs().max().item()
