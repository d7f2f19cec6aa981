"""The faster ways of computing on a CPU, each beside the plain one that it must equal."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import launch
from benchmarks import token_stream
from gpt2lab.config.schema import ModelConfig
from gpt2lab.distributed import runtime
from gpt2lab.model import gpt
from gpt2lab.model.gpt import build_model
from gpt2lab.model.loss import (
    GradientInForward,
    cross_entropy_sum,
    head_cross_entropy_sum,
    soft_cap,
)
from tiny import flags_for


def _qkv(T: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    drawn = (torch.randn(2, 3, T, 16, generator=generator) for _ in range(3))
    return [one.to(dtype).requires_grad_() for one in drawn]


@pytest.mark.parametrize("T", [1, 7, 64])
def test_attention_by_matmul_is_causal_attention(T):
    """Values and all three gradients, in fp32, where the two differ by rounding alone."""
    q, k, v = _qkv(T, torch.float32)
    gradient = torch.randn(2, 3, T, 16, generator=torch.Generator().manual_seed(0))
    ys = gpt.causal_by_matmul(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    results = [(y, *torch.autograd.grad(y, (q, k, v), gradient)) for y in ys]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_attention_by_matmul_is_for_short_rows_of_compiled_steps_alone(monkeypatch):
    """All else goes through torch's own attention, bit by bit where nothing is compiled."""
    taken: list[int] = []
    real = gpt.causal_by_matmul
    monkeypatch.setattr(
        gpt, "causal_by_matmul", lambda q, *more: taken.append(q.size(2)) or real(q, *more)
    )
    q, k, v = _qkv(64, torch.bfloat16)
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(gpt.attend(q, k, v, None, 0.0), reference)
    assert taken == []  # not compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = gpt.attend(q, k, v, None, 0.0)
    assert taken == [64]
    torch.testing.assert_close(found, reference, rtol=0, atol=2**-6)  # bf16 weights up to 1
    allowed = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    gpt.attend(q, k, v, allowed, 0.0)
    gpt.attend(q, k, v, None, 0.1)
    gpt.attend(q[:, :, -1:], k, v, allowed[:, :, -1:], 0.0)
    gpt.attend(*_qkv(1024, torch.bfloat16), None, 0.0)
    assert taken == [64]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("is_frozen", "cap"), [(False, 0.0), (True, 0.0), (False, 15.0)])
def test_compiled_loss_of_the_head_is_cross_entropy(dtype, is_frozen, cap):
    """Loss and gradients beside the plain form: targets left out, large scores, a factor on the loss, a frozen head.

    With a cap the head has a bias too.
    """
    generator = torch.Generator().manual_seed(3)
    hidden = (5 * torch.randn(2, 9, 16, generator=generator)).requires_grad_()
    weight = torch.randn(77, 16, generator=generator).requires_grad_(not is_frozen)
    targets = torch.randint(0, 77, (2, 9), generator=generator)
    targets[0, 3:5] = targets[1, 0] = -1
    trained = [hidden] if is_frozen else [hidden, weight]
    bias = torch.randn(77, generator=generator).requires_grad_() if cap else None
    trained += [bias] if bias is not None else []

    def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy_sum(soft_cap(F.linear(hidden, weight, bias), cap), targets)

    results = []

    def fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head_cross_entropy_sum(hidden, weight, targets, len(weight), bias, cap)

    exact = dtype == torch.float32
    torch._dynamo.reset()  # which compiles one function in few ways
    for loss_of in (torch.compile(fused, fullgraph=True), plain):
        with torch.autocast("cpu", torch.bfloat16 if exact else dtype, enabled=not exact):
            loss = loss_of(hidden, weight, targets)
        results.append((loss, *torch.autograd.grad(loss / 11, trained)))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == torch.float32
        # bf16: gradients of up to a few units, of products rounded to 8 bits.
        atol = 1e-5 if exact else 2**-6
        torch.testing.assert_close(found, expected, rtol=1e-5 if exact else 2**-7, atol=atol)


def test_loss_with_its_gradient_in_forward_is_for_compiled_steps_alone(monkeypatch):
    """What is not compiled gives the bits of the plain form; and a score that is not finite is seen in the loss."""
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "context_length": 4, "vocab_size": 10}
    model = build_model(ModelConfig(**shape), seed=0, device=torch.device("cpu"))
    ids, targets = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, -1, 0, 9]])
    expected = cross_entropy_sum(model(ids), targets)
    taken: list[bool] = []
    real = GradientInForward.apply
    monkeypatch.setattr(GradientInForward, "apply", lambda *a: taken.append(True) or real(*a))
    assert torch.equal(model(ids, targets), expected)
    assert not taken
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(model(ids, targets), expected)
    assert taken
    model.ln_f.bias.data[0] = float("nan")
    assert model(ids, targets).isnan()


def test_the_loss_kernel_of_gpus_is_cross_entropy():
    pytest.importorskip("triton", reason="no Triton (pip install triton==3.7.1)")
    cases = Path(__file__).parents[2] / "workers" / "loss_kernel.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", cases]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_fast_fp32_products_are_fp32_and_none_rounds_to_bf16(monkeypatch, request):
    """As on processors with AMX, where torch's switch means bf16: played by a product that rounds when it is set."""
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    taken = runtime.use_fast_fp32_matmul()
    assert torch.get_float32_matmul_precision() == ("medium" if taken else "highest")
    a = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1))
    exact = (a.double() @ a.T.double()).float()
    assert (a @ a.T - exact).abs().max() < 3e-6 * exact.abs().max()
    real = torch.Tensor.__matmul__

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rounds = torch.get_float32_matmul_precision() == "medium"
        return real(a.bfloat16(), b.bfloat16()).float() if rounds else real(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    torch.set_float32_matmul_precision("highest")
    assert runtime.use_fast_fp32_matmul() is False
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.slow
def test_fast_paths_follow_the_plain_fp32_loss(tiny_run, tmp_path):
    """Thirty steps from equal weights and data: as a long run computes by default, and in fp32, beside plain fp32."""
    tokens = token_stream.text_tokens(150_000, vocab_size=50304)
    token_stream.write_formats(tokens, tmp_path / "data")
    losses = {}
    kinds = {"plain": ["--dtype=fp32", "--compile=off"], "fp32": ["--dtype=fp32", "--compile=on"]}
    if runtime.fastest_dtype(torch.device("cpu")) == "bf16":
        kinds["default"] = ["--compile=on"]
    shape = ("--n_embd=64", "--context_length=128", "--vocab_size=50304", "--val_tokens=128")
    length = {"mini_batch_size": 4, "total_batch_size": 512, "max_steps": 30, "warmup_steps": 10}
    quiet = {"eval_freq": 0, "sample_freq": 0, "checkpoint_freq": 0}
    for name, flags in kinds.items():
        run = tiny_run(*shape, *flags_for(**length, **quiet), data=tmp_path / "data" / "shards")
        words = [flag for flag in run.flags if not flag.startswith(("--dtype", "--compile"))]
        launch.worked(launch.train_in_forks([*words, *flags]))
        losses[name] = [event["loss"] for event in run.events("step")]
    assert len(losses["plain"]) == 30

    def distance(name: str) -> float:
        pairs = zip(losses[name], losses["plain"], strict=True)
        return statistics.mean(abs(a - b) for a, b in pairs)

    assert distance("fp32") < 5e-4
    if "default" in losses:
        assert distance("default") < 1e-3
