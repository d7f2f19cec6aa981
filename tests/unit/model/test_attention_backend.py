"""Which attention kernel runs is looked at. On a CPU torch has two: its flash kernel, and plain products."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2lab.config.schema import ModelConfig
from gpt2lab.errors import ConfigError
from gpt2lab.model import attention_backend
from gpt2lab.model import gpt as model_module
from gpt2lab.model.attention_backend import backend_that_runs, choose
from gpt2lab.model.gpt import GPT, build_model

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=256)


def build(**changes: str) -> GPT:
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    return build_model(config, seed=1, device=torch.device("cpu"))


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.fixture
def undone(monkeypatch) -> Iterator[None]:
    """Take back what a choice sets for the rest of a process."""
    with contextlib.ExitStack() as stack, torch.compiler.config.patch(cache_key_tag="mine"):
        monkeypatch.setattr(attention_backend, "_for_good", stack)
        yield


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_kernel_that_runs_is_read_off_forward_and_backward(positions, masked):
    model = build(positions=positions, qk_norm="rmsnorm")
    for autocast in (contextlib.nullcontext, bf16):
        found = backend_that_runs(model, micro_batch=2, masked=masked, autocast=autocast)
        assert found == "flash"
        with sdpa_kernel(SDPBackend.MATH):
            found = backend_that_runs(model, micro_batch=2, masked=masked, autocast=autocast)
        assert found == "math"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_backward_pass_of_another_kind_is_noticed(monkeypatch):
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: object) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True)
        return y + q

    monkeypatch.setattr(model_module, "attend", attend)
    with pytest.raises(RuntimeError, match="the backward pass is not"):
        backend_that_runs(build(), micro_batch=2, masked=False, autocast=contextlib.nullcontext)


@pytest.mark.parametrize("wanted", ["auto", "flash"])
def test_a_choice_that_runs_is_returned_and_keeps_compiled_steps_apart(wanted, undone):
    assert choose(wanted, build(), micro_batch=2, masked=False, autocast=bf16) == "flash"
    assert torch.compiler.config.cache_key_tag == "mine attention flash"


@pytest.mark.parametrize("wanted", ["cudnn", "auto"])
def test_a_kernel_that_does_not_run_or_fails_is_one_line(wanted, undone, monkeypatch, wording):
    failed = RuntimeError("No available kernel. Aborting execution.\nand more")
    if wanted == "auto":
        monkeypatch.setattr(model_module, "attend", Mock(side_effect=failed))
    with pytest.raises(ConfigError, check=wording):
        choose(wanted, build(), micro_batch=2, masked=False, autocast=bf16)


def test_the_order_is_set_after_torch_has_set_its_own(undone, monkeypatch):
    """Before its first call on a GPU torch puts its order in place, over one that was set already: played here."""
    calls: list[None] = []

    def look(model: GPT, **unused: object) -> str:
        if not calls:
            torch._C._set_sdp_priority_order([int(SDPBackend.CUDNN_ATTENTION), 1, 2, 0, 4])
        calls.append(None)
        first = torch._C._get_sdp_priority_order()[0]
        return {3: "cudnn", 2: "efficient"}[first]

    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(attention_backend, "backend_that_runs", look)
    try:
        found = choose("efficient", build(), micro_batch=2, masked=False, autocast=bf16)
        assert (found, len(calls)) == ("efficient", 2)
    finally:
        torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize(
    ("found", "capability", "version", "is_slow"),
    [
        *(("flash", (9, 0), 91002, True), ("flash", (10, 0), 91500, True)),
        *(("flash", (9, 0), 91501, False), ("flash", (8, 0), 91002, False)),
        ("cudnn", (9, 0), 91002, False),
    ],
)
def test_flash_on_a_hopper_is_explained(monkeypatch, found, capability, version, is_slow):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    why = attention_backend.why_not_cudnn(found)
    assert (why is not None) == is_slow
    if version == 91002 and why:
        assert "5 to 12 %" in why
        assert "this is 9.10.2; pip install 'nvidia-cudnn-cu12>=9.15.1'" in why
