"""Hugging Face's config.json of a GPT-2 or of our own model type. No torch, no transformers."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from gpt2lab.config.schema import Config, ModelConfig
from gpt2lab.config.settings import OPTIONS, find_problems, options_of, override, wrong_types
from gpt2lab.errors import CheckpointError, DataError
from gpt2lab.files import NAME, OBJECT, SIZE, JsonFile, is_file_name
from gpt2lab.model.counts import Shapes, check_shapes, read_shapes
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from gpt2lab.tokenizers.opening import find_in

HF_CONFIG, HF_WEIGHTS = "config.json", "model.safetensors"
# Of weights in several files.
HF_INDEX, HF_SHARDS = f"{HF_WEIGHTS}.index.json", "model-*-of-*.safetensors"
# Model types: transformers' own, and that of huggingface/modeling_gpt2lab.py.
GPT2, GPT2LAB = "gpt2", "gpt2lab"
UNKNOWN = {"gpt2lab_tokenizer": "unknown"}  # in config.json, if no tokenizer is written
FORMAT = 2  # of a GPT2LAB folder; huggingface/configuration_gpt2lab.py has the same number
PADDED_VOCABULARY = 50_304  # rows of our own GPT-2s: NUM_TOKENS rounded up to a multiple of 64

# Our network in transformers' GPT2Config names: the default where the file says nothing, then equivalent values.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def required_of_ours(head: Any) -> dict[str, tuple[Any, ...]]:
    """Return what a folder of our own type must say. Format 1 lacked options, which have their defaults then."""
    return {"gpt2lab_format": (FORMAT, 1), "tie_word_embeddings": (head != "untied",)}


_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")  # causal masks that old files carry


def our_name(name: str) -> str | None:
    """Return our name of a tensor, None for a causal mask, which is no weight."""
    if _BUFFERS.search(name):
        return None
    return re.sub(r"^h\.", "blocks.", re.sub(r"^(transformer|model)\.", "", name))


def model_type_of(config: ModelConfig) -> str:
    """Return the model type under which a model is exported: GPT-2's wherever it is one."""
    return GPT2LAB if options_of(config) else GPT2


def tokenizer_is_unknown(folder: Path) -> bool:
    """Tell whether we exported a model without a tokenizer, so that its ids are not GPT-2's.

    Raises: CheckpointError.
    """
    return (
        UNKNOWN.items() <= JsonFile(folder / HF_CONFIG, CheckpointError, follow=True).read().items()
    )


def read_hf_config(folder: Path) -> ModelConfig:
    """Return the shape that config.json describes.

    Raises: CheckpointError naming the first setting that our network does not support.
    """
    file = JsonFile(folder / HF_CONFIG, CheckpointError, follow=True)
    path, values = file.path, file.read()
    kind = values.get("model_type")
    if kind not in (GPT2, GPT2LAB):
        raise CheckpointError(f"{path}: model_type {kind!r}, only 'gpt2' and 'gpt2lab' are read")
    required = REQUIRED if kind == GPT2 else required_of_ours(values.get("head"))
    for name, allowed in required.items():
        found = values.get(name, allowed[0])
        if found not in allowed:
            raise CheckpointError(f"{path}: {name} {found!r} is not supported, only {allowed[0]!r}")
    positions = "context_length"
    if kind == GPT2:
        positions = "n_positions" if values.get("n_positions") else "n_ctx"
    sizes = ("n_layer", "n_head", "n_embd", positions, "vocab_size")
    file.check(values, dict.fromkeys(sizes, SIZE))
    n_layer, n_head, n_embd, context_length, vocab_size = (values[name] for name in sizes)
    if n_embd % n_head:
        raise file.rejected(f"n_embd {n_embd} is not a multiple of n_head {n_head}")
    options: dict[str, Any] = {}
    if kind == GPT2LAB:
        options = {name: values.get(name, getattr(ModelConfig, name)) for name in OPTIONS}
        shaped = {**options, "n_head": n_head, "n_embd": n_embd}
        problems = list(wrong_types(options).values())
        if problems := problems or find_problems(override(Config(), shaped)):
            raise file.rejected("; ".join(problems))
    elif values.get("n_inner") not in (None, 4 * n_embd):
        raise CheckpointError(
            f"{path}: n_inner {values['n_inner']} is not supported, only 4 x n_embd"
        )
    files = weight_files(folder)
    shapes = {our_name(n) or "": shape for n, shape in _shapes_in(folder, files).items()}
    own = None
    with contextlib.suppress(DataError):  # weights need no tokenizer
        own = find_in(folder)
    # Without a tokenizer beside the weights, up to 50,304 rows are taken for GPT-2's vocabulary.
    is_gpt2 = vocab_size <= PADDED_VOCABULARY and not UNKNOWN.items() <= values.items()
    num_tokens = NUM_TOKENS if is_gpt2 else vocab_size
    config = ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        context_length=context_length,
        vocab_size=PADDED_VOCABULARY if vocab_size == NUM_TOKENS else vocab_size,
        num_tokens=num_tokens if own is None else own.size,
        **options,
    )
    check_shapes(files[0], shapes, config, rows=vocab_size)
    return config


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: one, or the shards that its index names.

    Raises: CheckpointError.
    """
    if (folder / HF_WEIGHTS).exists():
        return [folder / HF_WEIGHTS]
    if not (folder / HF_INDEX).exists():
        raise CheckpointError(
            f"{folder / HF_WEIGHTS}: no such file, nor {HF_INDEX}; only safetensors weights are read "
            "(save_pretrained writes them)"
        )
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> dict[str, str]:
    """Return {tensor: shard} of the index."""
    index = JsonFile(folder / HF_INDEX, CheckpointError, follow=True)
    values = index.read()
    index.check(values, {"weight_map": OBJECT})
    found: dict[str, str] = values["weight_map"]
    if not found or not all(map(is_file_name, found.values())):
        raise index.rejected(f"'weight_map' does not map every tensor to {NAME[1]}")
    return found


def _shapes_in(folder: Path, files: list[Path]) -> Shapes:
    """Return the shapes of all tensors; each shard holds just those that the index says."""
    if files == [folder / HF_WEIGHTS]:
        return read_shapes(files[0])
    weight_map = _weight_map(folder)
    shapes: Shapes = {}
    for path in files:
        found = read_shapes(path)
        if set(found) != {name for name, shard in weight_map.items() if shard == path.name}:
            raise CheckpointError(f"{path}: holds other tensors than {HF_INDEX} says; copy both")
        shapes |= found
    return shapes
