"""Validation loss on a fixed set of windows: the same number for any batch size and world size.

Its standard error counts documents, because windows of one document resemble each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from gpt2lab.data.order import Order
from gpt2lab.data.windows import WindowReader
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.model.gpt import GPT
from gpt2lab.tokenizers.interface import Tokenizer


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


class MeasuresLoss(Protocol):
    """Measures the loss of a model on held-out data."""

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> ValidationLoss | None:
        """Return the loss, the same on every rank; None if `interrupted` told all to stop."""


@dataclass(frozen=True)
class Parts:
    """The windows' targets, divided where a document ends: part p is targets [begin, end) of window `window[p]`.

    All arrays are (P,), ordered by window and place.
    """

    kind: Literal["document", "window"]
    window: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    unit: np.ndarray  # the document, or the window itself; numbered 0 to U - 1

    def fill(self, nats: np.ndarray, windows: np.ndarray, losses: np.ndarray) -> None:
        """Write the sums of some windows' losses, (len(windows), T), to their places in `nats`, (P,)."""
        for row, window in enumerate(windows.tolist()):
            first, last = np.searchsorted(self.window, [window, window + 1])
            nats[first:last] = np.add.reduceat(losses[row], self.begin[first:last])

    def by_unit(self, nats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return nats and targets of each unit, both (U,)."""
        targets = np.bincount(self.unit, weights=self.end - self.begin)
        return np.bincount(self.unit, weights=nats), targets


def divide_windows(order: Order, samples: np.ndarray, ends: list[np.ndarray]) -> Parts:
    """Return the parts of some windows, given the places of <|endoftext|>, or of documents' last tokens, in each shard.

    Before or after a document, <|endoftext|> as a target belongs to the document that it ends.
    """
    shards, offsets = order.locate(samples)
    T, count = order.context_length, len(samples)
    # A document may go on in the next shard: documents are numbered through all of them.
    before = np.cumsum([0, *map(len, ends)]).tolist()
    parts: list[tuple[int, int, int, int]] = []  # window, begin, end, document
    for window, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
        places = ends[shard] if ends else np.empty(0, np.int64)
        first, last = np.searchsorted(places, [offset + 1, offset + T])
        cuts = [
            0,
            *(places[first:last] - offset).tolist(),
            T,
        ]  # a target's index is its place - offset - 1
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            parts.append((window, begin, end, before[shard] + int(first) + number if ends else 0))
    documents = {
        document: number for number, document in enumerate(dict.fromkeys(p[3] for p in parts))
    }
    if len(documents) < 2 or not ends or not any(map(len, ends)):
        every = np.arange(count)
        return Parts("window", every, np.zeros(count, np.int64), np.full(count, T), every)
    window, begin, end = np.array([part[:3] for part in parts], dtype=np.int64).T
    return Parts("document", window, begin, end, np.array([documents[part[3]] for part in parts]))


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
        total = order.windows_per_epoch
        chosen = min(total, max(1, val_tokens // order.context_length))
        self.samples = np.arange(chosen, dtype=np.int64) * total // chosen  # (N,) window numbers
        ends = reader.find_document_ends(end_of_text)
        self._parts = divide_windows(order, self.samples, ends)

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> ValidationLoss | None:
        """Return the loss over all windows; the ranks share the windows and all get the result.

        Losses of targets are summed in fp64 in their own order, so that neither the cut into batches nor the world size
        enters the sum. The standard error takes a document as the unit, weighted by its
        targets; a window where the split has fewer than two documents or they are not known. Padding ids take no part
        in the softmax. Bits per byte is the loss of all targets, in bits, over the bytes of their text;
        <|endoftext|> has a loss but no bytes. None if `interrupted`, asked before each batch, told all to stop.

        Raises: DataError if a window cannot be read or its shard is damaged.
        """
        world, count = self._runtime.world_size, len(self.samples)
        mine = np.arange(self._runtime.rank, count, world)
        # As many rounds on every rank: `interrupted` is a collective.
        longest = math.ceil(count / world)
        found = np.zeros((2, count))  # bytes of text and checksum of each window
        of_parts = np.zeros(len(self._parts.window))  # nats
        was_training = model.training
        model.eval()
        try:
            for start in range(0, longest, self._batch_size):
                if interrupted():
                    return None
                rows = mine[start : start + self._batch_size]
                if len(rows):
                    found[:, rows] = self._measure_windows(rows, model, of_parts)
        finally:
            model.train(was_training)
        self._reader.wait_until_verified()  # no number rests on a damaged shard
        # One rank has each window, the others have 0.
        num_bytes, checksums = np.sum(self._runtime.gather(found), axis=0)
        of_parts = np.sum(self._runtime.gather(of_parts), axis=0)
        T = self._order.context_length
        windows = hashlib.sha256(checksums.astype("<u4").tobytes()).hexdigest()
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
        )

    def _measure_windows(self, rows: np.ndarray, model: GPT, of_parts: np.ndarray) -> np.ndarray:
        """Return the bytes of the targets of some windows and a checksum of each window, (2, len(rows)).

        The nats of their parts are written to `of_parts`.
        """
        windows = self._reader.read(*self._order.locate(self.samples[rows]))
        tokens = torch.from_numpy(windows.astype(np.int64)).to(self._runtime.device)  # (B, T + 1)
        with torch.inference_mode(), self._strategy.autocast():
            losses = model.losses_of(self._hidden(model, tokens[:, :-1]), tokens[:, 1:])  # (B, T)
        self._parts.fill(of_parts, rows, losses.double().cpu().numpy())  # sync
        table = self._bytes_per_token
        num_bytes = table[windows[:, 1:]].sum(axis=1) if table is not None else np.zeros(len(rows))
        return np.stack([num_bytes, [zlib.crc32(window.tobytes()) for window in windows]])
