"""Validation loss on a fixed set of windows: the same number for any batch, world or micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gpt2lab.data.order import Order
from gpt2lab.data.windows import WindowReader
from gpt2lab.loss import token_losses
from gpt2lab.model import GPT
from gpt2lab.parallel import Strategy
from gpt2lab.runtime import Runtime


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss in nats/token with its standard error over windows."""

    val_loss: float
    val_loss_se: float | None
    val_tokens: int


class Validation:
    """The windows, chosen once: `val_tokens` of them spread evenly over the split."""

    def __init__(
        self, order: Order, reader: WindowReader, *, val_tokens: int, batch_size: int
    ) -> None:
        self._order, self._reader, self._batch_size = order, reader, batch_size
        total = order.windows_per_epoch
        chosen = min(total, max(1, val_tokens // order.context_length))
        self.samples = np.arange(chosen, dtype=np.int64) * total // chosen  # (N,) window numbers

    def measure(self, model: GPT, *, strategy: Strategy, runtime: Runtime) -> ValidationLoss:
        """Return the loss over all windows; every process takes a share and all get the result.

        Each window's loss is summed in fp32 and the windows in fp64 in their own order, so that neither the cut into
        batches nor the number of processes enters the sum. The standard error takes a window as the unit, because
        neighbouring tokens are not independent.
        """
        sums = np.zeros(len(self.samples))
        mine = np.arange(runtime.rank, len(self.samples), runtime.world_size)
        model.eval()
        with torch.inference_mode(), strategy.eager(), strategy.autocast():
            for start in range(0, len(mine), self._batch_size):
                rows = mine[start : start + self._batch_size]
                windows = self._reader.read(*self._order.locate(self.samples[rows]))
                tokens = torch.from_numpy(windows.astype(np.int64)).to(runtime.device)  # (B, T + 1)
                losses = token_losses(model.logits(tokens[:, :-1]), tokens[:, 1:])  # (B, T)
                sums[rows] = losses.sum(dim=1).double().cpu().numpy()  # sync
        model.train()
        self._reader.release()
        means = (
            np.sum(runtime.gather(sums), axis=0) / self._order.context_length
        )  # one process has each, others 0
        count = len(means)
        se = float(means.std(ddof=1) / math.sqrt(count)) if count > 1 else None
        return ValidationLoss(float(means.mean()), se, count * self._order.context_length)
