"""Validation loss of a mixture: of each source, and their mean by the weights that the run began with."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from gpt2lab.config.schema import ModelConfig
from gpt2lab.data.mixture import PATTERN, MixedData
from gpt2lab.data.order import Order
from gpt2lab.data.shards import TokenData
from gpt2lab.data.windows import WindowReader
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.validation import MeasuresLoss, Validation, ValidationLoss
from gpt2lab.model.gpt import GPT
from gpt2lab.tokenizers.opening import why_no_text


def open_validation(
    data: TokenData,
    orders: Sequence[Order],
    model: ModelConfig,
    *,
    val_tokens: int,
    batch_size: int,
    strategy: Strategy,
    runtime: Runtime,
) -> MeasuresLoss:
    """Return the validation loss of a folder, or of a mixture whose sources share `val_tokens` equally.

    `orders`: of each source's validation windows.

    Raises: DataError.
    """
    sources = data.by_source()
    validations = [
        Validation(
            order,
            WindowReader(
                source.splits["val"],
                context_length=model.context_length,
                id_limit=model.id_limit,
                verify=runtime.local_rank == 0,  # once on each machine, which may have own files
            ),
            val_tokens=val_tokens // len(sources),
            batch_size=batch_size,
            tokenizer=None if why_no_text(source.tokenizer, model.vocab_size) else source.tokenizer,
            end_of_text=source.end_of_text.id,
            strategy=strategy,
            runtime=runtime,
        )
        for source, order in zip(sources, orders, strict=True)
    ]
    if not isinstance(data, MixedData):
        return validations[0]
    _, places = data.places()[0]
    weights = [count / PATTERN for count in places]
    return MixedValidation(data.names, weights, validations)


class MixedValidation:
    """The validation losses of all sources, and one number for the mixture."""

    def __init__(
        self, names: Sequence[str], weights: Sequence[float], validations: Sequence[MeasuresLoss]
    ) -> None:
        """`weights` add up to 1; a source that a later phase brings in has weight 0."""
        self._names, self._weights, self._validations = names, weights, validations

    def measure(
        self,
        model: GPT,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        keep_token_losses: bool = False,
    ) -> ValidationLoss | None:
        """Return the weighted mean over the sources, each in `by_source`; None if interrupted.

        Raises: DataError.
        """
        losses = []
        for validation in self._validations:
            loss = validation.measure(
                model, interrupted=interrupted, keep_token_losses=keep_token_losses
            )
            if loss is None:
                return None
            losses.append(loss)
        return combine(dict(zip(self._names, losses, strict=True)), self._weights)


def combine(by_source: dict[str, ValidationLoss], weights: Sequence[float]) -> ValidationLoss:
    """Return the mean of losses by weights that add up to 1.

    The sources are strata, measured apart, so that variances add up by the squares of the weights (Cochran 1977,
    "Sampling Techniques", 5.3). Bits per byte is that of a text mixed by the weights.
    """
    every = [(weight, loss) for weight, loss in zip(weights, by_source.values(), strict=True)]
    counted = [(weight, loss) for weight, loss in every if weight > 0]
    errors = [(weight, loss.val_loss_se) for weight, loss in counted]
    known = [weight * error for weight, error in errors if error is not None]
    # A unit weighs its part of its source, times the source's weight.
    of_units = np.concatenate([weight * _unit_weights(loss.results) for weight, loss in counted])
    kinds = list(dict.fromkeys(loss.val_se_unit for _, loss in counted))
    val_loss = sum(weight * loss.val_loss for weight, loss in every)  # not finite if one is not
    windows = [str(loss.results.units["windows"]) for _, loss in counted]
    kept = [loss.token_losses for loss in by_source.values() if loss.token_losses is not None]
    unit = kinds[0] if len(kinds) == 1 else "window"  # documents are not known everywhere
    return ValidationLoss(
        val_loss=val_loss,
        val_loss_se=math.hypot(*known) if len(known) == len(counted) else None,
        val_tokens=sum(loss.val_tokens for _, loss in every),
        val_se_unit=unit,
        val_effective_n=float(of_units.sum() ** 2 / (of_units**2).sum()),
        bits_per_byte=_bits_per_byte(counted),
        results=Results(
            kind="validation",
            units={
                "n": len(of_units),
                "unit": unit,
                "windows": hashlib.sha256(" ".join(windows).encode()).hexdigest(),
                "weights": [weight for weight, _ in counted],
            },
            per_unit={
                "val_loss": np.concatenate(
                    [loss.results.per_unit["val_loss"] for _, loss in counted]
                )
            },
            details={},
            weights=of_units,
        ),
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
