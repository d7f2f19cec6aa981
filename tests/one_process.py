"""A step of the trainer on one process and a batch for it: what memory tests measure; and what operators ran."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2lab.config.schema import ActivationCheckpointing, ModelConfig, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import GPT, build_model

CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """Records the names of the operators that run within, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Alone(Strategy):
    """The trainer's own strategy on one process, which tells a tracker of each forward pass."""

    def __init__(
        self,
        dtype: str,
        tracker: MemTracker | None = None,
        recompute: ActivationCheckpointing = "none",
    ) -> None:
        runtime = Runtime()
        runtime.use(SystemConfig(device="cpu"))
        super().__init__(runtime, SystemConfig(dtype=dtype, activation_checkpointing=recompute))
        self.tracker = tracker

    def autocast(self) -> torch.autocast:
        if self.tracker is not None:
            self.tracker.reset_mod_stats()  # it rejects a second forward pass otherwise
        return super().autocast()


def disturbed(config: ModelConfig) -> GPT:
    """Return a model whose every parameter is far from its initial value (biases and gains too)."""
    model, generator = build_model(config, seed=1, device=CPU), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def only_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Dynamo trace and count, and write no code."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend="eager"))
    torch._dynamo.reset()
    counters.clear()


def shape(L: int, C: int, H: int, T: int, V: int) -> ModelConfig:
    return ModelConfig(n_layer=L, n_embd=C, n_head=H, context_length=T, vocab_size=V)


def batch_of(config: ModelConfig, B: int, A: int) -> GlobalBatch:
    T = config.context_length

    def ids() -> torch.Tensor:
        return torch.zeros(B, T, dtype=torch.int64)

    micro = tuple(MicroBatch(ids(), ids(), i, i == A - 1) for i in range(A))
    return GlobalBatch(micro, A * B * T, 0, 0, A * B, None, 0.0)
