"""Validation loss on a fixed set of windows: the same number for any batch, world or micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        self,
        order: Order,
        reader: WindowReader,
        *,
        val_tokens: int,
        batch_size: int,
        strategy: Strategy,
        runtime: Runtime,
    ) -> None:
        self._order, self._reader, self._batch_size = order, reader, batch_size
        self._strategy, self._runtime = strategy, runtime
        total = order.windows_per_epoch
        chosen = min(total, max(1, val_tokens // order.context_length))
        self.samples = np.arange(chosen, dtype=np.int64) * total // chosen  # (N,) window numbers

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> ValidationLoss | None:
        """Return the loss over all windows; every process takes a share and all get the result.

        Each window's loss is summed in fp32 and the windows in fp64 in their own order, so that neither the cut into
        batches nor the number of processes enters the sum. The standard error takes a window as the unit, because
        neighbouring tokens are not independent. None if `interrupted`, asked before each batch, told all to stop.

        Raises: DataError if a window cannot be read.
        """
        world, count = self._runtime.world_size, len(self.samples)
        mine = np.arange(self._runtime.rank, count, world)
        longest = math.ceil(count / world)  # equally many rounds everywhere: asking is a collective
        sums = np.zeros(count)
        model.eval()
        try:
            for start in range(0, longest, self._batch_size):
                if interrupted():
                    return None
                rows = mine[start : start + self._batch_size]
                sums[rows] = self._window_losses(rows, model)
        finally:
            model.train()
            self._reader.release()
        whole = np.sum(self._runtime.gather(sums), axis=0)  # one process has each, others 0
        means = whole / self._order.context_length
        se = float(means.std(ddof=1) / math.sqrt(count)) if count > 1 else None
        return ValidationLoss(float(means.mean()), se, count * self._order.context_length)

    def _window_losses(self, rows: np.ndarray, model: GPT) -> np.ndarray:
        """Return the summed loss of some windows, (len(rows),) float64, in nats."""
        if len(rows) == 0:
            return np.zeros(0)
        windows = self._reader.read(*self._order.locate(self.samples[rows]))
        tokens = torch.from_numpy(windows.astype(np.int64)).to(self._runtime.device)  # (B, T + 1)
        with torch.inference_mode(), self._strategy.autocast():
            losses = token_losses(model.logits(tokens[:, :-1]), tokens[:, 1:])  # (B, T)
        return losses.sum(dim=1).double().cpu().numpy()  # sync
