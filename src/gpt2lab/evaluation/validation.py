"""Validation loss on a fixed set of windows: the same number for any batch size and world size.

Its standard error counts documents, because windows of one document resemble each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from gpt2lab.config.schema import ModelConfig
from gpt2lab.data.mixture import PATTERN, MixedData, validation_orders
from gpt2lab.data.order import Order
from gpt2lab.data.shards import TokenData, document_marks
from gpt2lab.data.windows import WindowReader
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import (
    Results,
    checksums_of,
    choose_windows,
    divide_windows,
    hash_checksums,
)
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.model.gpt import GPT, evaluating
from gpt2lab.runs.console import counted
from gpt2lab.tokenizers.opening import why_no_text

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
        """Return the loss, the same on every rank; None if `interrupted` returned True on any rank.

        With `keep_token_losses` it holds those of single tokens too, if they are of windows of token shards.
        """


class Validation:
    """The windows of one folder, chosen once: `val_tokens` of them spread evenly over the split."""

    def __init__(
        self,
        source: TokenData,
        order: Order,
        model: ModelConfig,
        *,
        val_tokens: int,
        batch_size: int,
        strategy: Strategy,
    ) -> None:
        self._order, self._batch_size = order, batch_size
        self._strategy, self._runtime = strategy, strategy.runtime
        self._hidden = strategy.for_evaluation(GPT.hidden, batch_size=batch_size)
        self._reader = WindowReader(
            source.splits["val"],
            context_length=model.context_length,
            id_limit=model.id_limit,
            verify=strategy.runtime.local_rank == 0,  # on each machine, which may have own files
        )
        self._bytes_per_token: np.ndarray | None = None  # of each id's text
        tokenizer = source.tokenizer
        if tokenizer is not None and not why_no_text(tokenizer, model.vocab_size):
            with contextlib.suppress(DataError):  # no vocabulary: training does not need it
                self._bytes_per_token = tokenizer.byte_lengths()
        self._samples = choose_windows(order, max(1, val_tokens // model.context_length))
        ends = [document_marks(shard, source.end_of_text.id) for shard in self._reader.shards]
        self._parts = divide_windows(order, self._samples, ends)

    def measure(
        self,
        model: GPT,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        keep_token_losses: bool = False,
    ) -> ValidationLoss | None:
        """Return the loss over all windows; each rank computes a part, and all get the result.

        Losses of targets are summed in fp64 in their own order, so that neither the batch size nor the world size
        changes the sum. The standard error takes a document as the unit, weighted by its
        targets; a window where the split has fewer than two documents or they are not known. Padding ids are excluded
        from the softmax. Bits per byte is the loss of all targets, in bits, over the bytes of their text;
        <|endoftext|> has a loss but no bytes. None if `interrupted`, called before each batch, returned True.

        With `keep_token_losses` the losses of single targets are kept too, rounded to fp16: nothing is computed from
        them here.

        Raises: DataError if a window cannot be read or its shard is damaged.
        """
        world, count = self._runtime.world_size, len(self._samples)
        mine = np.arange(self._runtime.rank, count, world)
        # As many rounds on every rank: `interrupted` is a collective.
        longest = math.ceil(count / world)
        found = np.zeros((2, count))  # bytes of text and checksum of each window
        of_parts = np.zeros(len(self._parts.window))  # nats
        T = self._order.context_length
        kept = np.zeros((len(mine), T), np.float16) if keep_token_losses else None
        self._reader.enter(self._order.locate(self._samples)[0])
        with evaluating(model):
            for start in counted(range(0, longest, self._batch_size), "batches"):
                if interrupted():
                    return None
                rows = mine[start : start + self._batch_size]
                if len(rows):
                    found[:, rows], losses = self._measure_windows(rows, model, of_parts)
                    if kept is not None:
                        kept[start : start + self._batch_size] = losses
        self._reader.verifier.wait()  # a damaged shard raises an error here
        # One rank has each window, the others have 0.
        num_bytes, checksums = np.sum(self._runtime.gather(found), axis=0)
        nats, targets = self._parts.by_unit(np.sum(self._runtime.gather(of_parts), axis=0))
        every: np.ndarray | None = None
        if kept is not None:
            every = np.empty((count, T), kept.dtype)
            for rank, part in enumerate(self._runtime.gather(kept)):
                every[rank::world] = part
        unit = self._parts.kind
        units = {"n": len(targets), "unit": unit, "windows": hash_checksums(checksums)}
        return loss_of_units(nats, targets, unit, units, num_bytes.sum(), every)

    def _measure_windows(
        self, rows: np.ndarray, model: GPT, of_parts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes of the targets and checksum of some windows, (2, len(rows)), and losses, (len(rows), T).

        The nats of their parts are written to `of_parts`.
        """
        windows = self._reader.read(*self._order.locate(self._samples[rows]))
        tokens = torch.from_numpy(windows.astype(np.int64)).to(self._runtime.device)  # (B, T + 1)
        with torch.inference_mode(), self._strategy.autocast():
            losses = model.losses_of(self._hidden(model, tokens[:, :-1]), tokens[:, 1:])  # (B, T)
        nats = losses.double().cpu().numpy()  # sync
        self._parts.fill(of_parts, rows, nats)
        table = self._bytes_per_token
        num_bytes = table[windows[:, 1:]].sum(axis=1) if table is not None else np.zeros(len(rows))
        return np.stack([num_bytes, checksums_of(windows)]), nats


def loss_of_units(
    nats: np.ndarray,
    targets: np.ndarray,
    unit: Literal["document", "window", "conversation"],
    units: dict[str, Any],
    text_bytes: float,
    token_losses: np.ndarray | None = None,
) -> ValidationLoss:
    """Return the loss from the nats and targets of each unit, both (U,); `units`: what identifies them."""
    estimate = estimate_mean(nats / targets, targets)
    bits = nats.sum() / math.log(2)
    return ValidationLoss(
        val_loss=float(nats.sum() / targets.sum()),
        val_loss_se=estimate.se,
        val_tokens=int(targets.sum()),
        val_se_unit=unit,
        val_effective_n=estimate.effective_n,
        bits_per_byte=float(bits / text_bytes) if text_bytes > 0 else None,
        results=Results("validation", units, {"val_loss": nats / targets}, {}, weights=targets),
        token_losses=token_losses,
    )


def open_validation(
    data: TokenData,
    model: ModelConfig,
    *,
    val_tokens: int,
    batch_size: int,
    strategy: Strategy,
) -> MeasuresLoss:
    """Return the validation loss of a folder, or of a mixture whose sources share `val_tokens` equally.

    Raises: DataError.
    """
    sources = data.by_source()
    orders = validation_orders(data, context_length=model.context_length)
    how: dict[str, Any] = {"batch_size": batch_size, "strategy": strategy}
    validations = [
        Validation(source, order, model, val_tokens=val_tokens // len(sources), **how)
        for source, order in zip(sources, orders, strict=True)
    ]
    if not isinstance(data, MixedData):
        return validations[0]
    _, places = data.places()[0]
    weights = [count / PATTERN for count in places]
    return MixedValidation(data.names, weights, validations)


@dataclass(frozen=True)
class MixedValidation:
    """The validation losses of all sources, and one number for the mixture."""

    names: Sequence[str]
    weights: Sequence[float]  # add up to 1; a source that a later phase brings in has 0
    validations: Sequence[MeasuresLoss]

    def measure(self, model: GPT, **how: Any) -> ValidationLoss | None:
        """Return the weighted mean over the sources, each in `by_source`; see MeasuresLoss.

        Raises: DataError.
        """
        losses = {}
        for name, validation in zip(self.names, self.validations, strict=True):
            if (loss := validation.measure(model, **how)) is None:
                return None
            losses[name] = loss
        return combine(losses, self.weights)


def combine(by_source: dict[str, ValidationLoss], weights: Sequence[float]) -> ValidationLoss:
    """Return the mean of losses by weights that add up to 1.

    The sources are strata, measured apart, so that variances add up by the squares of the weights (Cochran 1977,
    "Sampling Techniques", 5.3). Bits per byte is that of a text mixed by the weights.
    """
    every = [(weight, loss) for weight, loss in zip(weights, by_source.values(), strict=True)]
    counted = [(weight, loss) for weight, loss in every if weight > 0]
    errors = [w * loss.val_loss_se for w, loss in counted if loss.val_loss_se is not None]
    # A unit weighs its part of its source, times the source's weight.
    of_units = np.concatenate([weight * _unit_weights(loss.results) for weight, loss in counted])
    kinds = list(dict.fromkeys(loss.val_se_unit for _, loss in counted))
    val_loss = sum(weight * loss.val_loss for weight, loss in every)  # not finite if one is not
    windows = [str(loss.results.units["windows"]) for _, loss in counted]
    kept = [loss.token_losses for loss in by_source.values() if loss.token_losses is not None]
    unit = kinds[0] if len(kinds) == 1 else "window"  # documents are not known everywhere
    losses = np.concatenate([loss.results.per_unit["val_loss"] for _, loss in counted])
    units = {
        "n": len(of_units),
        "unit": unit,
        "windows": hashlib.sha256(" ".join(windows).encode()).hexdigest(),
        "weights": [weight for weight, _ in counted],
    }
    return ValidationLoss(
        val_loss=val_loss,
        val_loss_se=math.hypot(*errors) if len(errors) == len(counted) else None,
        val_tokens=sum(loss.val_tokens for _, loss in every),
        val_se_unit=unit,
        val_effective_n=float(of_units.sum() ** 2 / (of_units**2).sum()),
        bits_per_byte=_bits_per_byte(counted),
        results=Results("validation", units, {"val_loss": losses}, {}, weights=of_units),
        by_source=by_source,
        token_losses=np.concatenate(kept) if kept else None,
    )


def _unit_weights(results: Results) -> np.ndarray:
    weights = np.ones(results.n) if results.weights is None else results.weights
    return np.asarray(weights / weights.sum())


def _bits_per_byte(counted: Sequence[tuple[float, ValidationLoss]]) -> float | None:
    """Return bits over bytes of the mixture's mean token; None where a source's text is not known."""
    bits = bytes_each = 0.0
    for weight, loss in counted:
        if loss.bits_per_byte is None:
            return None
        bits += weight * loss.val_loss / math.log(2)
        bytes_each += weight * loss.val_loss / math.log(2) / loss.bits_per_byte
    return bits / bytes_each
