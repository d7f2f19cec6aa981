"""Global batches by sample number; a thread reads, hashes and puts them on the device ahead of the steps.

The loader has no position to save: the caller names the first sample, and a resume names it again.
"""

import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.mixture import Mixture
from gpt2lab.data.order import Order
from gpt2lab.data.windows import WindowReader, hash_windows


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: `tokens` and `targets` are (B, T) int64 on the device."""

    tokens: torch.Tensor
    targets: torch.Tensor
    index: int  # place in the global batch, the same at any world size
    is_last: bool  # of this rank's share


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one optimizer step, and facts of the full global batch."""

    micro_batches: tuple[MicroBatch, ...]
    num_targets: int  # in the global batch
    epoch: int
    first_sample: int
    samples: int  # in the global batch
    hash: str | None  # of the global batch; on rank 0 only, which logs it
    wait_seconds: float = 0.0  # that the step waited for the batch


class Loader:
    """An endless stream of global batches."""

    def __init__(
        self,
        order: Order | Mixture,
        reader: WindowReader,
        plan: BatchPlan,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self.order, self.reader, self._plan = order, reader, plan
        self._rank, self._device = rank, device

    def batches(self, first_sample: int) -> Generator[GlobalBatch, None, None]:
        """Yield the batches from `first_sample` on; the next two are fetched while one is trained on.

        Raises: DataError in the step that would have used a damaged shard.
        """
        is_gpu = self._device.type == "cuda"  # where a thread begins on GPU 0
        use_device = functools.partial(torch.cuda.set_device, self._device) if is_gpu else None
        thread = ThreadPoolExecutor(1, "loader", initializer=use_device)
        begun = (
            thread.submit(self.fetch, sample)
            for sample in itertools.count(first_sample, self._plan.samples)
        )
        try:
            waiting = deque(itertools.islice(begun, 2))
            while True:
                asked = time.monotonic()
                batch = waiting.popleft().result()
                waiting.append(next(begun))
                yield dataclasses.replace(batch, wait_seconds=time.monotonic() - asked)
        finally:
            # Wait for the thread: if it is inside torch when the interpreter ends, the process aborts.
            thread.shutdown(cancel_futures=True)
            self.reader.close()

    def fetch(self, first_sample: int) -> GlobalBatch:
        """Read one global batch now."""
        plan = self._plan
        share = plan.samples // plan.world_size
        begin = self._rank * share
        end = begin + (plan.samples if self._rank == 0 else share)  # rank 0 reads all, to hash all
        places = self.order.locate(np.arange(first_sample, first_sample + plan.samples))
        windows = self.reader.read(*places, slice(begin, end))
        digest = hash_windows(windows) if self._rank == 0 else None
        return self._batch(first_sample, windows[:share], num_targets=plan.tokens, digest=digest)

    def _batch(
        self,
        first_sample: int,
        windows: np.ndarray,
        targets: np.ndarray | None = None,
        *,
        num_targets: int,
        digest: str | None,
    ) -> GlobalBatch:
        """Divide this rank's windows, (B * accumulation, T + 1), into micro-batches on the device.

        `targets`, (B * accumulation, T): default each next token.
        """
        plan, micro_batches = self._plan, []
        for i in range(plan.accumulation):
            rows = slice(i * plan.micro_batch, (i + 1) * plan.micro_batch)
            ids = self._to_device(windows[rows])
            micro_batches.append(
                MicroBatch(
                    ids[:, :-1].contiguous(),
                    ids[:, 1:].contiguous() if targets is None else self._to_device(targets[rows]),
                    index=self._rank * plan.accumulation + i,
                    is_last=i == plan.accumulation - 1,
                )
            )
        return GlobalBatch(
            micro_batches=tuple(micro_batches),
            num_targets=num_targets,
            epoch=self.order.epoch_of(first_sample),
            first_sample=first_sample,
            samples=plan.samples,
            hash=digest,
        )

    def _to_device(self, ids: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(ids.astype(np.int64))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor
