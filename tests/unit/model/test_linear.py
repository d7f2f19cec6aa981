"""The linear layer of compiled GPU steps, called on the CPU: the gradients of torch's own."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from gpt2lab.model.gpt import Linear, SumsBiasByRow


def gradients(form: object, dtype: torch.dtype, *, trains_weight: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((3, 64, 8), (24, 8), (24,))
    x, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    weight.requires_grad_(trains_weight)
    assert callable(form)
    y = form(x, weight, bias)
    wanted = [x, weight, bias] if trains_weight else [x, bias]
    return [y, *torch.autograd.grad(y, wanted, torch.randn_like(y))]


@pytest.mark.parametrize("trains_weight", [True, False])
def test_gradients_are_those_of_torch_and_a_frozen_weight_costs_no_product(trains_weight):
    ours = gradients(SumsBiasByRow.apply, torch.float32, trains_weight=trains_weight)
    plain = gradients(F.linear, torch.float32, trains_weight=trains_weight)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    x, weight = torch.randn(3, 64, 8), torch.randn(24, 8)
    needs = (not trains_weight, trains_weight)
    ctx = SimpleNamespace(saved_tensors=(x, weight), dtype=x.dtype, needs_input_grad=needs)
    _, of_weight, _ = SumsBiasByRow.backward(ctx, torch.randn(3, 64, 24))
    assert (of_weight is not None) == trains_weight


def test_under_autocast_gradients_have_the_dtypes_of_what_they_are_of():
    with torch.autocast("cpu", torch.bfloat16):
        y, *ours = gradients(SumsBiasByRow.apply, torch.float32, trains_weight=True)
        _, *plain = gradients(F.linear, torch.float32, trains_weight=True)
    assert y.dtype == torch.bfloat16
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.1)


def test_uncompiled_it_is_torchs_own_layer():
    """To the bit, and in the graph that autograd records."""
    layer, x = Linear(8, 24), torch.randn(3, 64, 8)
    y = layer(x)
    assert y.grad_fn.name() == torch.nn.Linear.forward(layer, x).grad_fn.name()
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
