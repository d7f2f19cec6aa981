"""A checkpoint's tensors: gathered, looked at once, and written without a copy as safetensors' library writes them."""

from __future__ import annotations

import hashlib
import json

import pytest
import safetensors.torch
import torch

from gpt2lab.checkpoint import store
from gpt2lab.checkpoint.state import TrainState

DTYPES = (
    *(torch.uint8, torch.float16, torch.bfloat16, torch.int32),
    *(torch.float32, torch.float64, torch.int64),
)


def test_files_are_those_of_safetensors_own_library(tmp_path):
    """Of every type and of awkward names and shapes, and of a tensor that is hashed beside its writing."""
    tensors = {
        f"{name}{dtype}": torch.arange(count).reshape(shape).to(dtype)
        for dtype in DTYPES
        for name, count, shape in (
            ("b", 15, (3, 5)),
            ("é", 1, ()),
            ('"', 7, (7,)),
            ("z", 0, (0, 4)),
        )
    }
    tensors["large"] = torch.randn(3, 2**20)
    content = store.Content(tensors, {})
    drafted = store.draft(
        tmp_path, kind="rolling", content=content, state=TrainState(), rng_states=[], facts={}
    )
    folder = store.save(tmp_path, drafted)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name, expected in (("model", tensors), ("optim", {})):
        bytes_ = safetensors.torch.save(expected)
        assert (folder / f"{name}.safetensors").read_bytes() == bytes_
        assert files[f"{name}.safetensors"] == {
            "bytes": len(bytes_),
            "sha256": hashlib.sha256(bytes_).hexdigest(),
        }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_weight_that_is_not_finite_is_found(value):
    model = torch.nn.Linear(5, 3)
    assert store.collect(model, [], keep=True).is_finite
    model.weight.data[2, 4] = value
    assert not store.collect(model, [], keep=True).is_finite
