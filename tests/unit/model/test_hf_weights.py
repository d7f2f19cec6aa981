"""Hugging Face GPT-2 folders: the same logits and losses as transformers, anything else rejected by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2lab.errors import CheckpointError
from gpt2lab.model.hf_config import read_hf_config
from gpt2lab.model.hf_weights import load_hf
from gpt2lab.tokenizers.plain import BYTES

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 24}


@pytest.fixture(scope="module")
def theirs() -> GPT2LMHeadModel:
    """Return a random GPT-2 with real vocabulary and weights large enough to tell layouts apart."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


def rewrite(folder: Path, target: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    target.mkdir()
    values = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    safetensors.torch.save_file(tensors, target / "model.safetensors")
    return target


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_logits_equal_transformers(theirs, folder):
    ours = load_hf(folder).eval()
    ids = torch.randint(0, 50257, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(ids).logits, ours(ids)
    assert found.shape[-1] == 50304
    assert (found[..., :50257] - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())
    with torch.no_grad():
        scores = ours.masked_logits(ours.hidden(ids))
    assert torch.isneginf(scores[..., 50257:]).all(), "padding rows are not scored"
    assert found[..., 50257:].amax() <= expected.amax(), "nor likely where they are"


def test_a_folder_without_prefix_and_with_masks_is_read_too(theirs, folder, tmp_path):
    """As the original gpt2 on the Hub is written."""
    plain = {name.removeprefix("transformer."): t for name, t in tensors_of(folder).items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    old = rewrite(folder, tmp_path / "old", plain, n_positions=None, n_ctx=24)
    pairs = zip(load_hf(old).named_parameters(), load_hf(folder).parameters(), strict=True)
    for (name, a), b in pairs:
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "change",
    [
        *({"model_type": "llama"}, {"activation_function": "relu"}, {"layer_norm_epsilon": 1e-6}),
        *({"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}),
        *({"tie_word_embeddings": False}, {"n_inner": 100}, {"n_embd": None}, {"n_layer": 3}),
        *({"n_layer": 1}, {"n_positions": 30}),
    ],
    ids=str,
)
def test_another_architecture_is_rejected_by_name(change, folder, tmp_path, wording):
    other = rewrite(folder, tmp_path / "other", tensors_of(folder), **change)
    with pytest.raises(CheckpointError, check=wording):
        load_hf(other)


def test_damaged_and_untied_weights_are_rejected(folder, tmp_path):
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    with pytest.raises(CheckpointError, match="is tied"):
        load_hf(rewrite(folder, tmp_path / "untied", tensors))
    broken = rewrite(folder, tmp_path / "broken", tensors_of(folder))
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model.safetensors: "):
        load_hf(broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        load_hf(broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_hf_config(broken)


@pytest.mark.parametrize(("rows", "tokens"), [(300, 50_257), (50_400, 50_400)])
def test_other_vocabularies_keep_their_size(rows, tokens, tmp_path):
    GPT2LMHeadModel(GPT2Config(**SHAPE, vocab_size=rows)).save_pretrained(tmp_path)
    config = load_hf(tmp_path).config
    assert (config.vocab_size, config.num_tokens) == (rows, tokens)
    (tmp_path / "tokenizer.json").write_bytes(BYTES.tokenizer_json())
    assert read_hf_config(tmp_path).num_tokens == BYTES.size, "its own tokenizer's"
