"""A deep model's step is compiled by region: the blocks share one, whatever their number."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from gpt2lab.config.schema import ActivationCheckpointing, ModelConfig, OptimConfig, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.training.train_step import train_step
from one_process import only_trace

pytestmark = [
    pytest.mark.slow,
    # Dynamo hides it while it looks at a block's input, but not from a filter that makes it an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def _steps(
    layers: int, *, compile: str, recompute: ActivationCheckpointing = "none", **options: Any
) -> tuple[list[float], GPT]:
    """Take three steps of two micro-batches; evaluate between them as the trainer does, uncompiled."""
    shape = {"n_layer": layers, "n_head": 2, "n_embd": 16, "context_length": 16}
    config = ModelConfig(**shape, vocab_size=64, **options)
    runtime = Runtime()
    how = {"compile": compile, "activation_checkpointing": recompute}
    system = SystemConfig(device="cpu", dtype="fp32", **how)
    runtime.use(system)
    strategy = Strategy(runtime, system)
    model = build_model(config, seed=0, device=runtime.device)
    trained = strategy.prepare(model)
    optimizers = build_optimizers(model, OptimConfig())
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        ids = torch.randint(0, 64, (2, 2, 17), generator=generator)
        pairs = [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in ids]
        micro = tuple(MicroBatch(*pair, i, i == 1) for i, pair in enumerate(pairs))
        batch = GlobalBatch(micro, 64, 0, 0, 4, None, 0.0)
        how = {"strategy": strategy, "grad_clip": 1.0, "seed": 0}
        done = train_step(trained, optimizers, batch, 1e-2, **how)
        losses.append(done.loss)
        with torch.no_grad():
            model.hidden(ids[0, :1, :9])
    return losses, model


def _count(layers: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, int]:
    """Return what Dynamo traced."""
    only_trace(monkeypatch)
    _steps(layers, compile="on", **options)
    monkeypatch.undo()
    assert not counters["graph_break"]
    return dict(counters["stats"])


def test_blocks_of_a_deep_model_are_traced_once(monkeypatch):
    """No graph or operator more with more layers, in later steps, or for the evaluations between."""
    few, many = (_count(REGIONS_FROM_LAYERS + more, monkeypatch) for more in (0, 3))
    assert few["unique_graphs"] == 3  # embeddings, the block, the loss
    assert few == many


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_other_blocks_are_traced_once_too(recompute, monkeypatch):
    modern = {"norm": "rmsnorm", "positions": "rotary", "qk_norm": "rmsnorm"}
    counted = _count(REGIONS_FROM_LAYERS, monkeypatch, recompute=recompute, **modern)
    assert counted["unique_graphs"] == 3


def test_a_deep_compiled_model_learns_as_an_uncompiled_one():
    """Up to rounding; its parameters keep their names."""
    torch._dynamo.reset()
    expected, plain = _steps(REGIONS_FROM_LAYERS, compile="off")
    for recompute in ("none", "block"):
        losses, model = _steps(REGIONS_FROM_LAYERS, compile="on", recompute=recompute)
        assert_close(losses, expected, rtol=1e-5, atol=0)
        assert list(model.state_dict()) == list(plain.state_dict())
