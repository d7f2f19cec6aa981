"""Log-probabilities of continuations, by HellaSwag's scorer: what the tasks of lm-eval and CORE ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import NonFiniteError
from gpt2lab.evaluation.hellaswag import BATCH_TOKENS, cut_batches, make_rows, score_and_rank
from gpt2lab.evaluation.request import Subject
from gpt2lab.model.attention_backend import for_changing_shapes
from gpt2lab.runs.console import counted

_ENDINGS = 8  # of one context in one row: attention costs the square of a row's length
Pair = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]  # ids: context, continuation
T = TypeVar("T")


def own_share(batches: Sequence[T], runtime: Runtime) -> Iterable[T]:
    """Return this rank's share of some batches, and say how far it is."""
    return counted(batches[runtime.rank :: runtime.world_size], "batches")


def score_continuations(
    pairs: Sequence[Pair], subject: Subject, *, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each continuation in nats, (n,) float64, and whether it is greedy, (n,) bool.

    `longest`: ids of a context and its continuation that are kept, from the right. Every rank computes some batches and
    gets all numbers: the world size decides which rank computes a batch, never what a batch contains.

    Raises: NonFiniteError naming the weights.
    """
    model, runtime, strategy = subject.model, subject.runtime, subject.strategy
    groups = _by_context(pairs)
    order = np.array([number for numbers in groups for number in numbers], dtype=np.int64)
    rows = make_rows(
        (
            [np.array(pairs[numbers[0]][0]), *(np.array(pairs[number][1]) for number in numbers)]
            for numbers in groups
        ),
        context_length=longest - 1,
    )
    found = np.zeros((2, len(pairs)))
    with strategy.evaluating(model):
        batches = cut_batches(rows, batch_tokens=BATCH_TOKENS[runtime.device.type])
        for batch in own_share(batches, runtime):
            with torch.inference_mode(), strategy.autocast(), for_changing_shapes():
                slots, nats, is_greedy = score_and_rank(model, batch)
            found[:, order[slots]] = nats, is_greedy
    found = np.sum(runtime.gather(found), axis=0)  # one rank has each, the others have 0
    if not np.isfinite(found).all():
        raise NonFiniteError(f"{subject.target.name}: scores are not finite: broken weights")
    return found[0], found[1] > 0


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
