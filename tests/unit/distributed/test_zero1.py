"""ZeRO-1's update on one rank: AdamW's own bits, in a few operators for any number of weights."""

import copy
import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from gpt2lab.config.schema import ModelConfig, OptimConfig, SystemConfig
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.optim.optimizers import build_optimizers
from one_process import Operators

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Runtime]:
    """Return the runtime of a process that torchrun started alone."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            environment.setenv(name, value)
        runtime = Runtime()
        yield runtime
        gc.collect()  # DDP must go before its process group
        runtime.close()


class Sharded:
    """A model under zero1, with gradients as DDP leaves them."""

    def __init__(self, runtime: Runtime, layers: int) -> None:
        config = ModelConfig(n_layer=layers, n_head=1, n_embd=16, context_length=16, vocab_size=64)
        self.model: GPT = build_model(config, seed=0, device=CPU)
        self.plain = copy.deepcopy(self.model)
        strategy = Strategy(runtime, SystemConfig(dtype="fp32", parallel="zero1"))
        self.wrapped = strategy.prepare(self.model)
        optimizers = build_optimizers(self.model, OptimConfig())
        [self.optimizer] = strategy.shard_optimizer_state(self.model, optimizers)
        [self.reference] = build_optimizers(self.plain, OptimConfig())
        self.backward()

    def backward(self) -> None:
        """Add gradients, and give the plain model the same."""
        ids = torch.arange(16).view(1, 16)
        self.wrapped(ids, ids).backward()
        for parameter, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            other.grad = parameter.grad.clone()

    def assert_as_plain(self) -> None:
        pairs = zip(self.model.named_parameters(), self.plain.parameters(), strict=True)
        for (name, parameter), other in pairs:
            assert torch.equal(parameter, other), name


def test_the_operators_of_an_update_do_not_grow_with_the_weights(one_rank):
    found = []
    for layers in (2, 6):
        here = Sharded(one_rank, layers)
        for _ in range(2):  # the first makes the state, and DDP then makes other buckets
            here.optimizer.step()
            here.backward()
        here.optimizer.step()
        with Operators() as ran:
            here.optimizer.step()
        found.append(Counter(ran.names))
    assert found[0] == found[1]
    buckets = 2  # of matrices and of vectors
    assert found[0]["aten::_fused_adamw_"] == buckets
    assert found[0].total() <= 16 * buckets


def test_an_update_is_adamws_also_where_ddp_makes_other_buckets(one_rank):
    here = Sharded(one_rank, 1)
    for _ in range(3):
        here.optimizer.step()
        here.reference.step()
        here.assert_as_plain()
        here.backward()


def test_an_update_that_the_device_refuses_changes_nothing(one_rank):
    """`found_inf` is torch's own way to skip an update without waiting for the device."""
    here = Sharded(one_rank, 1)
    here.optimizer.step()
    weights = [parameter.detach().clone() for parameter in here.model.parameters()]
    state = _state(here.optimizer)
    here.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    here.optimizer.step()
    for parameter, before in zip(here.model.parameters(), weights, strict=True):
        assert torch.equal(parameter, before)
    for key, value in _state(here.optimizer).items():
        assert torch.equal(value, state[key]), key
    here.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    here.optimizer.step()
    for _ in range(2):
        here.reference.step()
    here.assert_as_plain()


def test_a_loaded_state_goes_on_as_the_one_that_was_saved(one_rank):
    here, other = Sharded(one_rank, 1), Sharded(one_rank, 1)
    other.optimizer.load_state_dict(here.optimizer.state_dict())  # as after steps all skipped
    here.optimizer.step()
    for _ in range(3):
        other.optimizer.step()
    other.optimizer.load_state_dict(here.optimizer.state_dict())
    other.model.load_state_dict(here.model.state_dict())
    for each in (here, other):
        each.optimizer.step()
    for one, two in zip(here.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    saved = other.optimizer.state_dict()["state"]
    assert {float(values["step"]) for values in saved.values()} == {2.0}


def _state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{number}/{key}": value.to_local().clone() if hasattr(value, "to_local") else value.clone()
        for number, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
