"""Write weights as a Hugging Face folder, and prove that transformers computes the same from it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch

from gpt2lab import paths
from gpt2lab.checkpoint.target import Target, find_target, was_tuned
from gpt2lab.checkpoint.weights import load_weights
from gpt2lab.config.settings import options_of
from gpt2lab.errors import CheckError, ConfigError, SaveError, first_line
from gpt2lab.files import sync_folder, write_durably
from gpt2lab.huggingface.model_card import write_card
from gpt2lab.model.gpt import GPT
from gpt2lab.model.hf_config import HF_WEIGHTS, real_vocabulary, write_hf_config
from gpt2lab.model.hf_weights import hf_tensors
from gpt2lab.tokenizers.chat_template import JINJA
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, NUM_TOKENS, gpt2_encoding, vocabulary_files

Dtype = Literal["float32", "bfloat16"]
TOLERANCE = 1e-5  # of the largest logit
_TEXT = "Hello, I'm a language model: naïve café, 你好, 🙂\n\tdef f(x):\n    return x  # 12345"


def export(
    name: str, *, checkpoint_dir: Path, out: Path, dtype: Dtype, push_to_hub: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write the weights that `name` means to the new folder `out`; it appears complete and checked, or not at all.

    Returns: the numbers, as --json prints them, and warnings.

    Raises: ConfigError, CheckpointError, DataError before anything is written; CheckError if transformers loads or
    computes otherwise; SaveError.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            'an export is checked with transformers, which is not installed: pip install "transformers>=5"'
        )
    if out.exists():
        raise ConfigError(f"{out}: exists already; choose another --out")
    if push_to_hub is not None:
        _check_login()
    target = find_target(name, checkpoint_dir)
    if options := options_of(target.model_config()):
        raise ConfigError(
            f"{name}: {options}; Hugging Face's GPT-2 has no such model, only the gpt2 presets are exported"
        )
    model = load_weights(target).eval()
    tensors = hf_tensors(model, getattr(torch, dtype))
    with _staged(out) as folder:
        content = safetensors.torch.save(tensors, metadata={"format": "pt"})
        write_durably(folder / HF_WEIGHTS, content)
        write_hf_config(model.config, folder, dtype=dtype)
        if model.config.vocab_size >= NUM_TOKENS:
            _write_tokenizer(folder, target, model.config.context_length)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, dtype)))
        max_abs_diff, max_abs_logit = _check(folder, model)
        numbers = {
            "out": str(out),
            "max_abs_diff": max_abs_diff,
            "max_abs_logit": max_abs_logit,
            "parameters": sum(tensor.numel() for tensor in tensors.values()),
            "dtype": dtype,
        }
        write_card(target, folder, numbers)
    if push_to_hub is not None:
        _push(out, push_to_hub)
    return numbers, target.warnings


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Hand out a temporary folder beside `out` and rename it when the block ends without an error."""
    folder = out.with_name(f".tmp-{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        folder.mkdir(parents=True)
        yield folder
        sync_folder(folder)
        os.rename(folder, out)
    except OSError as error:
        raise SaveError(f"{out}: {error.strerror or error}; choose another --out") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_tokenizer(folder: Path, target: Target, context_length: int) -> None:
    """Write GPT-2's tokenizer, the end-of-text settings, and the chat template of a tuned model."""
    merges, ids = vocabulary_files()
    shutil.copyfile(merges, folder / "merges.txt")
    shutil.copyfile(ids, folder / "vocab.json")
    end = "<|endoftext|>"
    special: dict[str, Any] = {"bos_token": end, "eos_token": end, "unk_token": end}
    settings = {
        **special,
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "model_max_length": context_length,
    }
    if was_tuned(target):
        settings["chat_template"] = JINJA
    generation = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    for name, values in (
        ("special_tokens_map.json", special),
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def _check(folder: Path, model: GPT) -> tuple[float, float]:
    """Return the largest difference of transformers' logits from the model's, and the largest logit.

    One text of random ids as long as the context, so that every position is looked up; fp32 on the CPU.

    Raises: CheckError.
    """
    from transformers import AutoTokenizer, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    real, length = real_vocabulary(model.config), model.config.context_length
    ids = torch.randint(0, real, (1, length), generator=torch.Generator().manual_seed(0))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        expected = model.logits(ids)[..., :real]
        try:
            theirs = GPT2LMHeadModel.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
            found = theirs.eval()(ids).logits
        except Exception as error:  # transformers may raise anything
            raise CheckError(
                f"the export was not kept: transformers cannot use it ({first_line(error)})"
            ) from error
    torch.set_float32_matmul_precision(precision)
    difference = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= TOLERANCE * max(1.0, largest):  # also when it is not a number
        raise CheckError(
            f"the export was not kept: transformers' logits differ by {difference:.2e} from ours, "
            f"whose largest is {largest:.2f}"
        )
    if (folder / "vocab.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer(_TEXT)["input_ids"] != gpt2_encoding().encode_ordinary(_TEXT):
            raise CheckError("the export was not kept: transformers' tokenizer gives other ids")
    return difference, largest


def _check_login() -> None:
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # not logged in, a dead token, no network
        raise ConfigError(
            f"--push_to_hub: the Hugging Face Hub does not know you ({first_line(error)}); hf auth login"
        ) from error


def _push(out: Path, name: str) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(name, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=out, commit_message="Export by gpt2lab")
    except Exception as error:  # many kinds; the folder is complete
        raise SaveError(
            f"{paths.for_people(out)} is written and checked, but not pushed to {name} ({first_line(error)})"
        ) from error
