"""A step of the trainer on one process and a batch for it: what memory tests measure."""

from __future__ import annotations

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from gpt2lab.config.schema import ActivationCheckpointing, ModelConfig, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy

CPU = torch.device("cpu")


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


def shape(L: int, C: int, H: int, T: int, V: int) -> ModelConfig:
    return ModelConfig(n_layer=L, n_embd=C, n_head=H, context_length=T, vocab_size=V)


def batch_of(config: ModelConfig, B: int, A: int) -> GlobalBatch:
    T = config.context_length

    def ids() -> torch.Tensor:
        return torch.zeros(B, T, dtype=torch.int64)

    micro = tuple(MicroBatch(ids(), ids(), i, i == A - 1) for i in range(A))
    return GlobalBatch(micro, A * B * T, 0, 0, A * B, None, 0.0)
