"""The loss kernel of GPUs beside the plain loss, by Triton's interpreter: run by test_compiled_paths.py.

A program of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

import pytest
import torch
from torch import library

from gpt2lab.config.schema import ModelConfig
from gpt2lab.distributed import fsdp
from gpt2lab.model import loss_kernel as kernel
from gpt2lab.model.gpt import GPT
from gpt2lab.model.loss import cross_entropy_sum


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(library, "wrap_triton", lambda kernel: kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("V", "num_tokens", "scale"),
    [(50304, 50257, 4), (2048, 50257, 1e4), (4100, 4097, 1000), (101, 64, 1)],
)
def test_losses_and_gradients_are_those_of_the_plain_loss(dtype, V, num_tokens, scale):
    """Targets left out, at both ends and beside a padding row; scores too large for an exponential."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, V, generator=generator) * scale).to(dtype)
    last = min(num_tokens, V) - 1
    targets = torch.tensor([-1, 0, last, last // 2, -1])
    scores = logits.float()
    scores[:, num_tokens:] = -torch.inf
    expected = cross_entropy_sum(scores.requires_grad_()[None], targets[None])
    (gradient,) = torch.autograd.grad(expected, scores)
    losses = kernel.cross_entropy_(logits, targets, num_tokens)
    torch.testing.assert_close(losses.sum(), expected, rtol=1e-6, atol=1e-5)
    assert losses[targets < 0].tolist() == [0, 0]
    # The interpreter cuts bf16 off, a GPU rounds.
    torch.testing.assert_close(logits.float(), gradient, rtol=2**-7, atol=1e-7)
    assert not logits[targets < 0].any()
    assert not logits[:, num_tokens:].any()


def test_bad_scores_and_targets_are_seen_in_the_loss():
    logits = torch.zeros(3, 8, dtype=torch.bfloat16)
    logits[0, 3] = torch.nan
    losses = kernel.cross_entropy_(logits, torch.tensor([1, 1, 7]), 7)  # the last is padding
    assert losses.isnan().tolist() == [True, False, False]
    assert losses.isinf().tolist() == [False, False, True]


def test_the_model_takes_the_kernel_where_it_can_and_it_is_right(monkeypatch):
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "context_length": 4, "vocab_size": 100}
    plain, large = GPT(ModelConfig(**shape)), GPT(ModelConfig(**{**shape, "vocab_size": 60_000}))
    capped = GPT(ModelConfig(**shape, logit_cap=15.0))
    for model, dtype in ((plain, "fp32"), (large, "bf16"), (capped, "bf16")):
        assert kernel.choose(model, dtype) is None
        assert model.loss_kernel is None
    assert kernel.choose(plain, "bf16") is None
    assert plain.loss_kernel is kernel.cross_entropy_
    assert fsdp.skeleton(plain).loss_kernel is kernel.cross_entropy_  # it copies the model
    plain.loss_kernel, right = None, kernel.cross_entropy_
    monkeypatch.setattr(kernel, "cross_entropy_", lambda *a: right(*a) + 1)
    assert "off by 1.0e+00 on this GPU" in kernel.choose(plain, "bf16")
    monkeypatch.setattr(kernel, "cross_entropy_", lambda *a: 1 / 0)
    assert "loss kernel: division by zero" in kernel.choose(plain, "bf16")
    assert plain.loss_kernel is None
