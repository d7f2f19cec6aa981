"""Log-probabilities of continuations, by HellaSwag's scorer: what the tasks of lm-eval and CORE ask for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpt2lab.distributed.strategy import Strategy
from gpt2lab.evaluation.hellaswag import (
    BATCH_TOKENS,
    ScoredRow,
    cut_batches,
    make_rows,
    predict_endings,
    score_batches,
)
from gpt2lab.model.gpt import GPT, LOGITS_BYTES
from gpt2lab.model.loss import token_losses

_ENDINGS = 8  # of one context in one row: attention costs the square of a row's length
Pair = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]  # ids: context, continuation


def score_continuations(
    pairs: Sequence[Pair],
    model: GPT,
    strategy: Strategy,
    *,
    longest: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> np.ndarray | None:
    """Return the log-probability of each continuation in nats, and 1 if it is greedy, else 0: (2, n) float64.

    `longest`: ids of a context and its continuation that are kept, from the right. Every rank computes some batches and
    gets all numbers: the world size decides which rank computes a batch, never what a batch contains. None if
    `interrupted`, called before each batch, returned True.

    Raises: NonFiniteError.
    """
    groups = _by_context(pairs)
    order = np.array([number for numbers in groups for number in numbers], dtype=np.int64)
    rows = make_rows(
        (
            [np.array(pairs[numbers[0]][0]), *(np.array(pairs[number][1]) for number in numbers)]
            for numbers in groups
        ),
        context_length=longest - 1,
    )
    batches = cut_batches(rows, batch_tokens=BATCH_TOKENS[strategy.device.type])
    zeros = np.zeros((2, len(pairs)))
    found = score_batches(model, strategy, batches, score_and_rank, zeros, interrupted)
    return None if found is None else found[:, np.argsort(order)]


def _by_context(pairs: Sequence[Pair]) -> list[list[int]]:
    """Return the numbers of the pairs that share a context, at most `_ENDINGS` at a time."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for number, (context, _) in enumerate(pairs):
        groups[np.array(context, np.uint32).tobytes()].append(number)
    return [
        numbers[first : first + _ENDINGS]
        for numbers in groups.values()
        for first in range(0, len(numbers), _ENDINGS)
    ]


def score_and_rank(model: GPT, rows: list[ScoredRow]) -> tuple[np.ndarray, np.ndarray]:
    """Return what HellaSwag's `score` does, and 1 for each ending that is greedy, else 0: values are (2, endings).

    Greedy: the likeliest token after token would have written it.
    """
    picked, ids, owners, slots = predict_endings(model, rows)
    parts = max(1, math.ceil(4 * model.config.vocab_size * len(ids) / LOGITS_BYTES))  # of no ids, 1
    nats, misses = [], []
    for some, wanted in zip(picked.chunk(parts), ids.chunk(parts), strict=True):
        logits = model.masked_logits(some)  # (P / parts, V)
        nats.append(token_losses(logits, wanted))
        misses.append(logits.argmax(dim=-1) != wanted)
    counts = [
        np.bincount(owners, weights=torch.cat(of).double().cpu().numpy(), minlength=len(slots))
        for of in (nats, misses)
    ]
    return slots, np.stack([-counts[0], counts[1] == 0])
