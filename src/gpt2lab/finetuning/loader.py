"""Global batches of rows: the pretraining loader's stream, with the answers alone as targets."""

from __future__ import annotations

import numpy as np
import torch

from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.loader import GlobalBatch, Loader, MicroBatch
from gpt2lab.data.order import Order, Shuffle
from gpt2lab.data.windows import hash_windows
from gpt2lab.finetuning.rows import NOBODY, Rows


def order_of(rows: Rows, *, shuffle: Shuffle, seed: int) -> Order:
    """Return the order of rows: that of the windows of one shard."""
    T = rows.ids.shape[1] - 1
    return Order([len(rows) * T + 1], context_length=T, shuffle=shuffle, seed=seed)


class _RowReader:
    """Rows in memory, where the stream expects a reader of files."""

    def __init__(self, rows: Rows) -> None:
        self._ids = rows.ids

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return self._ids[offsets // (self._ids.shape[1] - 1)]

    def release(self) -> None: ...

    def wait_until_verified(self) -> None: ...

    def close(self) -> None: ...


class RowLoader(Loader):
    """An endless stream of global batches of rows. Every process holds all rows, so that it can count all targets."""

    def __init__(
        self, order: Order, rows: Rows, plan: BatchPlan, *, rank: int, device: torch.device
    ) -> None:
        super().__init__(order, _RowReader(rows), plan, rank=rank, device=device)
        self._rows = rows

    def fetch(self, first_sample: int) -> GlobalBatch:
        """Lay out one global batch now; its targets are the answers in it."""
        plan = self._plan
        samples = np.arange(first_sample, first_sample + plan.samples)
        numbers = self.order.locate(samples)[1] // plan.context_length  # (S,)
        ids = self._rows.ids[numbers]  # (S, T + 1)
        targets = np.where(self._rows.owner[numbers] == NOBODY, -1, ids.astype(np.int64))[:, 1:]
        micro_batches = []
        for place in range(plan.accumulation):
            index = self._rank * plan.accumulation + place
            mine = slice(index * plan.mini_batch_size, (index + 1) * plan.mini_batch_size)
            micro_batches.append(
                MicroBatch(
                    self._move(ids[mine, :-1].astype(np.int64)),
                    self._move(targets[mine]),
                    index,
                    is_last=place == plan.accumulation - 1,
                )
            )
        return GlobalBatch(
            micro_batches=tuple(micro_batches),
            num_targets=int((targets >= 0).sum()),
            epoch=self.order.epoch_of(first_sample),
            first_sample=first_sample,
            samples=plan.samples,
            hash=hash_windows(ids) if self._rank == 0 else None,
            wait_seconds=0.0,
        )

    def _move(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor
