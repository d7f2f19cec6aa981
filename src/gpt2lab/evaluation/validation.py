"""Validation loss on a fixed set of windows: the same number for any batch size and world size."""

from __future__ import annotations

import contextlib
import hashlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gpt2lab.data.order import Order
from gpt2lab.data.windows import WindowReader
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import Results, mean_and_error
from gpt2lab.model.gpt import GPT
from gpt2lab.model.loss import token_losses
from gpt2lab.tokenizers.gpt2 import token_bytes


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss in nats/token with its standard error over windows, and the same in bits/byte of text."""

    val_loss: float
    val_loss_se: float | None
    val_tokens: int
    bits_per_byte: float | None  # None where the ids are not known to be GPT-2's
    results: Results  # window by window


class MeasuresLoss(Protocol):
    """Measures the loss of a model on held-out data."""

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> ValidationLoss | None:
        """Return the loss, the same on every rank; None if `interrupted` told all to stop."""


class Validation:
    """The windows, chosen once: `val_tokens` of them spread evenly over the split."""

    def __init__(
        self,
        order: Order,
        reader: WindowReader,
        *,
        val_tokens: int,
        batch_size: int,
        is_gpt2: bool,
        strategy: Strategy,
        runtime: Runtime,
    ) -> None:
        """`is_gpt2`: the ids are GPT-2's, so that their text is known."""
        self._order, self._reader, self._batch_size = order, reader, batch_size
        self._strategy, self._runtime = strategy, runtime
        self._bytes_per_token: np.ndarray | None = None  # of each id's text
        if is_gpt2:
            with contextlib.suppress(DataError):  # no vocabulary: training does not need it
                self._bytes_per_token = token_bytes()
        total = order.windows_per_epoch
        chosen = min(total, max(1, val_tokens // order.context_length))
        self.samples = np.arange(chosen, dtype=np.int64) * total // chosen  # (N,) window numbers

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> ValidationLoss | None:
        """Return the loss over all windows; the ranks share the windows and all get the result.

        Each window's loss is summed in fp32 and the windows in fp64 in their own order, so that neither the cut into
        batches nor the world size enters the sum. The standard error takes a window as the unit, because
        neighbouring tokens are not independent. Padding ids take no part in the softmax. Bits per byte is the loss of
        all targets, in bits, over the bytes of their text; <|endoftext|> has a loss but no bytes. None if
        `interrupted`, asked before each batch, told all to stop.

        Raises: DataError if a window cannot be read or its shard is damaged.
        """
        world, count = self._runtime.world_size, len(self.samples)
        mine = np.arange(self._runtime.rank, count, world)
        # As many rounds on every rank: `interrupted` is a collective.
        longest = math.ceil(count / world)
        found = np.zeros((3, count))  # nats, bytes of text and checksum of each window
        was_training = model.training
        model.eval()
        try:
            for start in range(0, longest, self._batch_size):
                if interrupted():
                    return None
                rows = mine[start : start + self._batch_size]
                if len(rows):
                    found[:, rows] = self._measure_windows(rows, model)
        finally:
            model.train(was_training)
            self._reader.release()
        self._reader.wait_until_verified()  # no number rests on a damaged shard
        # One rank has each window, the others have 0.
        nats, num_bytes, checksums = np.sum(self._runtime.gather(found), axis=0)
        T = self._order.context_length
        windows = hashlib.sha256(checksums.astype("<u4").tobytes()).hexdigest()
        loss, se = mean_and_error(nats / T)
        text_bytes = num_bytes.sum()
        return ValidationLoss(
            val_loss=loss,
            val_loss_se=se,
            val_tokens=count * T,
            bits_per_byte=float(nats.sum() / math.log(2) / text_bytes) if text_bytes > 0 else None,
            results=Results(
                kind="validation",
                units={"n": count, "tokens_each": T, "windows": windows},
                per_unit={"val_loss": nats / T},
                details={"bytes": num_bytes.astype(np.int64)},
            ),
        )

    def _measure_windows(self, rows: np.ndarray, model: GPT) -> np.ndarray:
        """Return of some windows the summed loss in nats, the targets' bytes and a checksum, (3, len(rows))."""
        windows = self._reader.read(*self._order.locate(self.samples[rows]))
        tokens = torch.from_numpy(windows.astype(np.int64)).to(self._runtime.device)  # (B, T + 1)
        with torch.inference_mode(), self._strategy.autocast():
            scores = model.masked_logits(model.hidden(tokens[:, :-1]))  # (B, T, V)
            losses = token_losses(scores, tokens[:, 1:])  # (B, T)
        nats = losses.sum(dim=1).double().cpu().numpy()  # sync
        table = self._bytes_per_token
        num_bytes = table[windows[:, 1:]].sum(axis=1) if table is not None else np.zeros(len(rows))
        return np.stack([nats, num_bytes, [zlib.crc32(window.tobytes()) for window in windows]])
