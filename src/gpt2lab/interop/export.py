"""Write weights as a Hugging Face folder, and prove that transformers computes the same from it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch

from gpt2lab import paths
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.config.schema import ModelConfig
from gpt2lab.config.settings import OPTIONS
from gpt2lab.errors import CheckError, ConfigError, SaveError, first_line, system_errors_as
from gpt2lab.files import staged_folder, write_durably
from gpt2lab.interop.model_card import write_card
from gpt2lab.model.gpt import GPT
from gpt2lab.model.hf_config import (
    GPT2LAB,
    HF_CONFIG,
    HF_INDEX,
    REQUIRED,
    UNKNOWN,
    model_type_of,
    required_of_ours,
)
from gpt2lab.model.hf_weights import OF_THE_VOCABULARY, TRANSPOSED
from gpt2lab.runs.target import Target, was_tuned
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.chat_template import Turn
from gpt2lab.tokenizers.gpt2 import GPT2, vocabulary_files
from gpt2lab.tokenizers.huggingface import CONFIG_FILE, TOKENIZER_FILE
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import why_no_text
from gpt2lab.tokenizers.plain import CharactersTokenizer

Dtype = Literal["float32", "bfloat16"]
TOLERANCE = 1e-5  # of the largest logit
# Copied into the folder of a model that transformers does not know: the code that trust_remote_code runs.
OWN_FILES = ("configuration_gpt2lab.py", "modeling_gpt2lab.py")
_TEXT = "Hello, I'm a language model: naïve café, 你好, 🙂\n\tdef f(x):\n    return x  # 12345"


def export(
    target: Target,
    *,
    out: Path,
    dtype: Dtype,
    push_to_hub: str | None,
    shard_bytes: int = 5 * 10**9,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write the weights of `target` to the new folder `out`; it appears complete and checked, or not at all.

    `shard_bytes`: the largest size of a file of weights.

    Returns: the numbers, as --json prints them, and warnings.

    Raises: ConfigError, CheckpointError or DataError before anything is written; CheckError if transformers loads or
    computes something else; SaveError.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "an export is checked with transformers, which is not installed (the extra `export`): "
            'pip install "transformers>=5"'
        )
    if out.exists():
        raise ConfigError(f"{out}: exists already; choose another --out")
    if push_to_hub is not None:
        _check_login()
    model = load_weights(target).eval()
    tokenizer = target.tokenizer()
    warnings = target.warnings
    if (problem := why_no_text(tokenizer, model.config.id_limit)) is not None:
        tokenizer, warnings = None, (*warnings, f"{problem}: no tokenizer is written")
    tensors = hf_tensors(model, getattr(torch, dtype))
    with system_errors_as(SaveError, out, fix="choose another --out"), staged_folder(out) as folder:
        _write_weights(folder, tensors, shard_bytes)
        faultpoint("export.weights", 0)
        end_of_text = tokenizer.end_of_text if tokenizer else None
        write_hf_config(model.config, folder, dtype=dtype, end_of_text=end_of_text)
        if model_type_of(model.config) == GPT2LAB:
            for name in OWN_FILES:
                shutil.copyfile(Path(__file__).with_name(name), folder / name)
        if tokenizer is not None:
            _write_tokenizer(folder, target, tokenizer, model.config.context_length)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, dtype)))
        max_abs_diff, max_abs_logit = _check(folder, model, tokenizer)
        if was_tuned(target) and tokenizer is not None and not keeps_template(folder, tokenizer):
            warnings = (
                *warnings,
                "no chat template is written: transformers encodes a conversation as one text, which gives answers "
                "other ids than those trained on; gpt2lab chat and serve give the right ones",
            )
        numbers = {
            "out": str(out),
            "max_abs_diff": max_abs_diff,
            "max_abs_logit": max_abs_logit,
            "parameters": sum(tensor.numel() for tensor in tensors.values()),
            "dtype": dtype,
        }
        write_card(target, folder, numbers)
        faultpoint("export.before_rename", 0)
    if push_to_hub is not None:
        _push(out, push_to_hub)
    return numbers, warnings


def hf_tensors(model: GPT, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return {transformers' name: tensor in its layout} without padding rows; the tied head appears once."""
    tensors = {}
    is_ours = model_type_of(model.config) == GPT2LAB
    for full_name, parameter in model.named_parameters():
        name = full_name if full_name.startswith("lm_head.") else f"model.{full_name}"
        if not is_ours:
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
    model_type = model_type_of(config)
    if model_type != GPT2LAB:
        values = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": model_type,
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
            "model_type": model_type,
            **sizes,
            "context_length": config.context_length,
            **{name: getattr(config, name) for name in OPTIONS},
            "dropout": 0.0,
            **common,
            **{name: allowed[0] for name, allowed in required_of_ours(config.head).items()},
        }
    values |= UNKNOWN if end_of_text is None else {}
    (folder / HF_CONFIG).write_text(json.dumps(values, indent=2) + "\n")


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], shard_bytes: int) -> None:
    """Write one file, or shards of at most `shard_bytes` and their index, as transformers' save_pretrained does."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        some = {name: tensors[name] for name in names}
        write_durably(folder / file, safetensors.torch.save(some, metadata={"format": "pt"}))
    if split.is_sharded:
        count = sum(tensor.numel() for tensor in tensors.values())
        index = {
            "metadata": {"total_parameters": count, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        (folder / HF_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_tokenizer(
    folder: Path, target: Target, tokenizer: Tokenizer, context_length: int
) -> None:
    end = tokenizer.end_token
    special: dict[str, Any] = {"bos_token": end, "eos_token": end}
    if tokenizer == GPT2:
        merges, ids = vocabulary_files()
        shutil.copyfile(merges, folder / "merges.txt")
        shutil.copyfile(ids, folder / "vocab.json")
        special["unk_token"] = end
        kind = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    else:
        (folder / TOKENIZER_FILE).write_bytes(tokenizer.tokenizer_json())
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings = {**special, **kind, "model_max_length": context_length}
    if was_tuned(target):
        settings["chat_template"] = chat_template.jinja(end)
    generation = {name: tokenizer.end_of_text for name in ("bos_token_id", "eos_token_id")}
    for name, values in (
        ("special_tokens_map.json", special),
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def _check(folder: Path, model: GPT, tokenizer: Tokenizer | None) -> tuple[float, float]:
    """Return the largest difference of transformers' logits from the model's, and the largest logit.

    One text of random ids as long as the context, so that every position is looked up; fp32 on the CPU.
    """
    from transformers import AutoTokenizer, GPT2LMHeadModel
    from transformers.utils import logging

    network = GPT2LMHeadModel
    if model_type_of(model.config) == GPT2LAB:  # the same file as in the folder
        from gpt2lab.interop.modeling_gpt2lab import GPT2LabForCausalLM

        network = GPT2LabForCausalLM
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    real, length = model.config.id_limit, model.config.context_length
    ids = torch.randint(0, real, (1, length), generator=torch.Generator().manual_seed(0))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        expected = model(ids)[..., :real]
        try:
            theirs = network.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            found = theirs.eval()(ids).logits
        except Exception as error:  # transformers may raise anything
            raise CheckError(
                f"export discarded: transformers cannot load it ({first_line(error)})"
            ) from error
    torch.set_float32_matmul_precision(precision)
    difference = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= TOLERANCE * max(1.0, largest):  # also when it is not a number
        raise CheckError(
            f"export discarded: transformers' logits differ by {difference:.2e} from ours, "
            f"whose largest is {largest:.2f}"
        )
    if tokenizer is not None:
        # Characters know no others than their own.
        text = (
            "".join(tokenizer.characters) if isinstance(tokenizer, CharactersTokenizer) else _TEXT
        )
        # A tokenizer does not need the folder's code. Without trust_remote_code=False transformers asks on stdout.
        loaded = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        ids_of_text = tokenizer.encode(text)
        if loaded(text, add_special_tokens=False)["input_ids"] != ids_of_text:
            raise CheckError("export discarded: transformers' tokenizer gives other ids")
        if loaded.decode(ids_of_text) != tokenizer.decode(ids_of_text):
            raise CheckError("export discarded: transformers' tokenizer gives other text")
    return difference, largest


def keeps_template(folder: Path, tokenizer: Tokenizer) -> bool:
    """Tell whether transformers' chat template gives the ids that the model was trained on; remove it if not."""
    from transformers import AutoTokenizer

    # Letters of the template, which a tokenizer of few characters has as well.
    turns = [Turn("user", "I"), Turn("assistant", "Response"), Turn("user", "I")]
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    talk = [{"role": turn.role, "content": turn.text} for turn in turns]
    text = loaded.apply_chat_template(talk, tokenize=False)
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    if ids == chat_template.encode(turns, tokenizer)[0]:
        return True
    path = folder / CONFIG_FILE
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings, indent=2) + "\n")
    return False


def _check_login() -> None:
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # not logged in, a dead token, no network
        raise ConfigError(
            f"--push_to_hub: not logged in to the Hugging Face Hub ({first_line(error)}); run: hf auth login"
        ) from error


def _push(out: Path, name: str) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(name, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=out, commit_message="Export by gpt2lab")
    except Exception as error:  # many kinds; the folder is complete
        raise SaveError(
            f"{paths.display_path(out)} is written and checked, but not pushed to {name} ({first_line(error)})"
        ) from error
