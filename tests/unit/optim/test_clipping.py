"""The norm of the gradient: right to many digits, and the same however the rows are sharded."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2lab.config.schema import SystemConfig
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.optim.optimizers import sum_of_squares
from one_process import Operators


def test_the_norm_of_a_dense_embedding_is_right_where_fp32_is_not():
    gradient = torch.full((50304, 768), 1e-3)
    exact = math.sqrt((gradient[0, 0].double().item() ** 2) * gradient.numel())
    embedding = nn.Embedding(50304, 768)
    embedding.weight.grad = gradient.clone()
    found = Strategy(Runtime(), SystemConfig()).clip_grad_norm(embedding, 1e9).item()
    assert found == pytest.approx(exact, rel=1e-6)
    in_fp32 = torch.linalg.vector_norm(gradient).item()
    assert abs(in_fp32 / exact - 1) > 100 * abs(found / exact - 1), "torch's own norm would do"


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_rows_that_are_sharded_give_the_same_norm(shards):
    gradient = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))
    whole = sum_of_squares([gradient]).item()
    parts = sum(sum_of_squares([rows]).item() for rows in gradient.chunk(shards))
    assert parts == pytest.approx(whole, rel=1e-14)


def test_a_gpu_is_given_no_more_calls_for_more_gradients():
    """Each is a kernel that the CPU starts between backward and update."""
    found = []
    for count in (10, 148):
        with FakeTensorMode():
            gradients = [torch.empty(4, 8, device="cuda") for _ in range(count)]
            with Operators() as ran:
                sum_of_squares(gradients)
        found.append(len(ran.names))
    assert found[0] == found[1] < 10
