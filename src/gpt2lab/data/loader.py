"""Global batches by sample number: read, hashed and put on the device one step ahead by a thread.

The loader has no position worth saving: the caller names the first sample, and resuming is naming it again.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.order import Order
from gpt2lab.data.windows import hash_windows


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: `tokens` and `targets` are (B, T) int64 on the device."""

    tokens: torch.Tensor
    targets: torch.Tensor
    index: int  # place in the global batch, the same whatever the number of processes
    is_last: bool  # of this process's share


@dataclass(frozen=True)
class GlobalBatch:
    """This process's share of one optimizer step, and what is true of the whole."""

    micro_batches: tuple[MicroBatch, ...]
    num_targets: int  # of the whole global batch
    epoch: int
    first_sample: int
    samples: int  # of the whole global batch
    hash: str | None  # of the whole global batch; on the first process only, which logs it
    wait_seconds: float  # what the step stood still for


class Reads(Protocol):
    """Whatever gives windows by shard and offset; see windows.py."""

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the windows at (shards, offsets), both (n,), as an (n, T + 1) uint16 array."""

    def release(self) -> None:
        """Give memory back after a batch."""

    def wait_until_verified(self) -> None:
        """Return when all that was read so far is known to be undamaged."""

    def close(self) -> None:
        """Let go of everything."""


class Loader:
    """An endless stream of global batches."""

    def __init__(
        self,
        order: Order,
        reader: Reads,
        plan: BatchPlan,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self.order, self._reader, self._plan = order, reader, plan
        self._rank, self._device = rank, device

    def batches(self, first_sample: int) -> Generator[GlobalBatch, None, None]:
        """Yield the batches from `first_sample` on, prefetched one ahead.

        Raises: DataError when a shard turns out to be damaged (in the step that would have used it).
        """
        ready: queue.Queue[GlobalBatch | BaseException] = queue.Queue(maxsize=1)
        stopped = threading.Event()
        producer = threading.Thread(
            target=self._produce, args=(first_sample, ready, stopped), name="loader", daemon=True
        )
        producer.start()
        try:
            while True:
                asked = time.monotonic()
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield _with_wait(item, time.monotonic() - asked)
        finally:
            # Wait for it: a thread that is inside torch when the interpreter ends aborts the process.
            stopped.set()
            producer.join()
            self._reader.close()

    def _produce(
        self,
        sample: int,
        ready: queue.Queue[GlobalBatch | BaseException],
        stopped: threading.Event,
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on GPU 0
        item: GlobalBatch | BaseException
        while not stopped.is_set():
            try:
                item = self.fetch(sample)
            except BaseException as error:  # handed over: the step that needs the batch raises it
                item = error
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.05)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            sample += self._plan.samples

    def fetch(self, first_sample: int) -> GlobalBatch:
        """Read one global batch now."""
        plan = self._plan
        share = plan.samples // plan.world_size
        if self._rank == 0:  # reads all, to hash all
            windows = self._read(first_sample, plan.samples)
            digest = hash_windows(windows)
            mine = windows[:share]
        else:
            mine, digest = self._read(first_sample + self._rank * share, share), None
        self._reader.release()
        micro_batches = tuple(
            self._to_device(
                mine[i * plan.mini_batch_size : (i + 1) * plan.mini_batch_size],
                index=self._rank * plan.accumulation + i,
                is_last=i == plan.accumulation - 1,
            )
            for i in range(plan.accumulation)
        )
        return GlobalBatch(
            micro_batches=micro_batches,
            num_targets=plan.tokens,
            epoch=self.order.epoch_of(first_sample),
            first_sample=first_sample,
            samples=plan.samples,
            hash=digest,
            wait_seconds=0.0,
        )

    def wait_until_verified(self) -> None:
        """Return when every shard touched so far is known to be undamaged.

        Raises: DataError naming a damaged one.
        """
        self._reader.wait_until_verified()

    def _read(self, first_sample: int, samples: int) -> np.ndarray:
        return self._reader.read(
            *self.order.locate(np.arange(first_sample, first_sample + samples))
        )

    def _to_device(self, windows: np.ndarray, *, index: int, is_last: bool) -> MicroBatch:
        tokens = torch.from_numpy(windows.astype(np.int64))  # (B, T + 1)
        if self._device.type == "cuda":
            tokens = tokens.pin_memory().to(self._device, non_blocking=True)
        return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), index, is_last)


def _with_wait(batch: GlobalBatch, seconds: float) -> GlobalBatch:
    return dataclasses.replace(batch, wait_seconds=seconds)
