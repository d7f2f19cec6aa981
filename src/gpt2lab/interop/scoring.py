"""Log-probabilities of continuations, by HellaSwag's scorer: what the tasks of lm-eval and CORE ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import NonFiniteError
from gpt2lab.evaluation.hellaswag import BATCH_TOKENS, cut_batches, make_rows, score_and_rank
from gpt2lab.model.attention_backend import for_changing_shapes
from gpt2lab.model.gpt import GPT
from gpt2lab.runs.console import counted

T = TypeVar("T")


def own_share(batches: Sequence[T], runtime: Runtime) -> Iterable[T]:
    """Return this rank's share of some batches, and say how far it is."""
    return counted(batches[runtime.rank :: runtime.world_size], "batches")


def score_continuations(
    sequences: Sequence[Sequence[np.ndarray]],
    model: GPT,
    *,
    longest: int,
    strategy: Strategy,
    runtime: Runtime,
    name: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each continuation in nats, (n,) float64, and whether it is greedy, (n,) bool.

    `sequences`: the ids of a context and of the continuations that share it. `longest`: ids of both that are kept,
    from the right. Every rank computes some batches and gets all numbers: the world size decides which rank computes a
    batch, never what a batch contains.

    Raises: NonFiniteError naming the weights, `name`.
    """
    rows = make_rows(sequences, context_length=longest - 1)
    batches = cut_batches(rows, batch_tokens=BATCH_TOKENS[runtime.device.type])
    found = np.zeros((2, sum(len(row.slots) for row in rows)))
    with strategy.evaluating(model):
        for batch in own_share(batches, runtime):
            with torch.inference_mode(), strategy.autocast(), for_changing_shapes():
                slots, nats, is_greedy = score_and_rank(model, batch)
            found[:, slots] = nats, is_greedy
    found = np.sum(runtime.gather(found), axis=0)  # one rank has each, the others have 0
    if not np.isfinite(found).all():
        raise NonFiniteError(f"{name}: scores are not finite: broken weights")
    return found[0], found[1] > 0
