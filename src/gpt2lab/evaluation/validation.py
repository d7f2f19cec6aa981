"""Validation loss on a fixed set of windows: the same number for any batch size and world size.

Its standard error counts documents, because windows of one document resemble each other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from gpt2lab.data.order import Order
from gpt2lab.data.windows import WindowReader
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.evaluation.validation_windows import (
    checksums_of,
    choose_windows,
    divide_windows,
    hash_checksums,
)
from gpt2lab.model.gpt import GPT
from gpt2lab.tokenizers.interface import Tokenizer

NUMBERS = (
    *("val_loss", "val_loss_se", "val_tokens", "val_se_unit", "val_effective_n"),
    "bits_per_byte",
)


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss in nats/token with its standard error over units, and the same in bits/byte of text."""

    val_loss: float
    val_loss_se: float | None
    val_tokens: int
    val_se_unit: Literal["document", "window", "conversation"]
    val_effective_n: float  # of equally large units that would weigh as much
    bits_per_byte: float | None  # None where the text of the ids is not known
    results: Results  # unit by unit
    by_source: dict[str, ValidationLoss] = field(default_factory=dict)  # of a mixture
    token_losses: np.ndarray | None = None  # (N, T) fp16, window by window, where they are kept

    def numbers(self) -> dict[str, Any]:
        """Return the numbers as events and `gpt2lab evaluate` record them; by source only of a mixture."""
        found = {name: getattr(self, name) for name in NUMBERS}
        if self.by_source:
            for name in ("val_loss", "val_loss_se"):
                by_source = {key: getattr(of, name) for key, of in self.by_source.items()}
                found[f"{name}_by_source"] = by_source
        return found


class MeasuresLoss(Protocol):
    """Measures the loss of a model on held-out data."""

    def measure(
        self,
        model: GPT,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        keep_token_losses: bool = False,
    ) -> ValidationLoss | None:
        """Return the loss, the same on every rank; None if `interrupted` told all to stop.

        With `keep_token_losses` it holds those of single tokens too, if they are of windows of token shards.
        """


class Validation:
    """The windows, chosen once: `val_tokens` of them spread evenly over the split."""

    def __init__(
        self,
        order: Order,
        reader: WindowReader,
        *,
        val_tokens: int,
        batch_size: int,
        tokenizer: Tokenizer | None,
        end_of_text: int | None,
        strategy: Strategy,
        runtime: Runtime,
    ) -> None:
        """`tokenizer`: of the ids; None where their text is not known. `end_of_text`: the id between documents."""
        self._order, self._reader, self._batch_size = order, reader, batch_size
        self._strategy, self._runtime = strategy, runtime
        self._hidden = strategy.for_evaluation(GPT.hidden, batch_size=batch_size)
        self._bytes_per_token: np.ndarray | None = None  # of each id's text
        if tokenizer is not None:
            with contextlib.suppress(DataError):  # no vocabulary: training does not need it
                self._bytes_per_token = tokenizer.byte_lengths()
        wanted = max(1, val_tokens // order.context_length)
        self.samples = choose_windows(order, wanted)
        ends = reader.find_document_ends(end_of_text)
        self._parts = divide_windows(order, self.samples, ends)

    def measure(
        self,
        model: GPT,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        keep_token_losses: bool = False,
    ) -> ValidationLoss | None:
        """Return the loss over all windows; the ranks share the windows and all get the result.

        Losses of targets are summed in fp64 in their own order, so that neither the cut into batches nor the world size
        enters the sum. The standard error takes a document as the unit, weighted by its
        targets; a window where the split has fewer than two documents or they are not known. Padding ids take no part
        in the softmax. Bits per byte is the loss of all targets, in bits, over the bytes of their text;
        <|endoftext|> has a loss but no bytes. None if `interrupted`, asked before each batch, told all to stop.

        With `keep_token_losses` the losses of single targets are kept too, rounded to fp16: nothing is computed from
        them here.

        Raises: DataError if a window cannot be read or its shard is damaged.
        """
        world, count = self._runtime.world_size, len(self.samples)
        mine = np.arange(self._runtime.rank, count, world)
        # As many rounds on every rank: `interrupted` is a collective.
        longest = math.ceil(count / world)
        found = np.zeros((2, count))  # bytes of text and checksum of each window
        of_parts = np.zeros(len(self._parts.window))  # nats
        T = self._order.context_length
        kept = np.zeros((len(mine), T), np.float16) if keep_token_losses else None
        with self._strategy.evaluating(model):
            for start in range(0, longest, self._batch_size):
                if interrupted():
                    return None
                rows = mine[start : start + self._batch_size]
                if len(rows):
                    found[:, rows], losses = self._measure_windows(rows, model, of_parts)
                    if kept is not None:
                        kept[start : start + self._batch_size] = losses
        self._reader.wait_until_verified()  # no number rests on a damaged shard
        # One rank has each window, the others have 0.
        num_bytes, checksums = np.sum(self._runtime.gather(found), axis=0)
        of_parts = np.sum(self._runtime.gather(of_parts), axis=0)
        windows = hash_checksums(checksums)
        unit_nats, targets = self._parts.by_unit(of_parts)
        per_unit = unit_nats / targets
        estimate, text_bytes = estimate_mean(per_unit, targets), num_bytes.sum()
        return ValidationLoss(
            val_loss=float(unit_nats.sum() / targets.sum()),
            val_loss_se=estimate.se,
            val_tokens=count * T,
            val_se_unit=self._parts.kind,
            val_effective_n=estimate.effective_n,
            bits_per_byte=float(unit_nats.sum() / math.log(2) / text_bytes)
            if text_bytes > 0
            else None,
            results=Results(
                kind="validation",
                units={"n": len(targets), "unit": self._parts.kind, "windows": windows},
                per_unit={"val_loss": per_unit},
                details={},
                weights=targets,
            ),
            token_losses=None if kept is None else self._gather_windows(kept),
        )

    def _gather_windows(self, mine: np.ndarray) -> np.ndarray:
        """Return the rows of all ranks, (N, T), in the order of the windows, from those of this rank."""
        every = np.empty((len(self.samples), *mine.shape[1:]), mine.dtype)
        for rank, rows in enumerate(self._runtime.gather(mine)):
            every[rank :: self._runtime.world_size] = rows
        return every

    def _measure_windows(
        self, rows: np.ndarray, model: GPT, of_parts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes of the targets and checksum of some windows, (2, len(rows)), and losses, (len(rows), T).

        The nats of their parts are written to `of_parts`.
        """
        windows = self._reader.read(*self._order.locate(self.samples[rows]))
        tokens = torch.from_numpy(windows.astype(np.int64)).to(self._runtime.device)  # (B, T + 1)
        with torch.inference_mode(), self._strategy.autocast():
            losses = model.losses_of(self._hidden(model, tokens[:, :-1]), tokens[:, 1:])  # (B, T)
        nats = losses.double().cpu().numpy()  # sync
        self._parts.fill(of_parts, rows, nats)
        table = self._bytes_per_token
        num_bytes = table[windows[:, 1:]].sum(axis=1) if table is not None else np.zeros(len(rows))
        return np.stack([num_bytes, checksums_of(windows)]), nats
