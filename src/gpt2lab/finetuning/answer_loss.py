"""Validation loss of fine-tuning: of the answers alone, conversation by conversation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.validation import ValidationLoss
from gpt2lab.finetuning.packed import hidden_of_rows
from gpt2lab.finetuning.rows import NOBODY, Rows
from gpt2lab.model.gpt import GPT
from gpt2lab.model.loss import token_losses
from gpt2lab.tokenizers.gpt2 import token_bytes


class AnswerLoss:
    """The rows held out, or as many of them as `val_tokens` allows, spread evenly."""

    def __init__(
        self,
        rows: Rows,
        *,
        val_tokens: int,
        batch_size: int,
        strategy: Strategy,
        runtime: Runtime,
    ) -> None:
        self._batch_size, self._strategy, self._runtime = batch_size, strategy, runtime
        total, T = len(rows), rows.ids.shape[1] - 1
        chosen = min(total, max(1, val_tokens // T))
        places = np.arange(chosen, dtype=np.int64) * total // chosen
        self._ids, self._owner = rows.ids[places], rows.owner[places]

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> ValidationLoss | None:
        """Return the loss over all answers, in nats per answer token; every process takes a share of the rows.

        Sums are of conversations in their own order, in fp64. The standard error takes a conversation as the unit; the
        loss is a ratio of two sums over them, its error that of the ratio (Cochran 1977, equation 6.13).
        """
        world, rank, count = self._runtime.world_size, self._runtime.rank, len(self._ids)
        mine = np.arange(rank, count, world)
        longest = math.ceil(count / world)  # equally many rounds everywhere: asking is a collective
        nats = np.zeros(int(self._owner.max()) + 1)
        was_training = model.training
        model.eval()
        try:
            for begin in range(0, longest, self._batch_size):
                if interrupted():
                    return None
                rows = mine[begin : begin + self._batch_size]
                if len(rows):
                    self._add(nats, rows, model)
        finally:
            model.train(was_training)
        nats = np.sum(self._runtime.gather(nats), axis=0)  # a conversation is one process's
        return self._summarize(nats)

    def _add(self, nats: np.ndarray, rows: np.ndarray, model: GPT) -> None:
        """Add the loss of some rows' answers to those of their conversations."""
        ids = torch.from_numpy(self._ids[rows].astype(np.int64)).to(self._runtime.device)
        owner = self._owner[rows][:, 1:]  # (B, T)
        with torch.inference_mode(), self._strategy.autocast():
            losses = token_losses(model.scores(hidden_of_rows(model, ids[:, :-1])), ids[:, 1:])
        losses_here = losses.double().cpu().numpy()  # sync
        is_answer = owner != NOBODY
        np.add.at(nats, owner[is_answer], losses_here[is_answer])

    def _summarize(self, nats: np.ndarray) -> ValidationLoss:
        owner, ids = self._owner[:, 1:], self._ids[:, 1:]
        is_answer = owner != NOBODY
        tokens = np.bincount(owner[is_answer], minlength=len(nats))
        bytes_each = token_bytes()[ids[is_answer]]
        measured = tokens > 0  # with --val_tokens some conversations are not looked at
        nats, tokens = nats[measured], tokens[measured]
        loss, n = nats.sum() / tokens.sum(), len(nats)
        residuals = nats - loss * tokens
        se = math.sqrt(n / (n - 1) * (residuals**2).sum()) / tokens.sum() if n > 1 else None
        return ValidationLoss(
            val_loss=float(loss),
            val_loss_se=se,
            val_tokens=int(tokens.sum()),
            bits_per_byte=float(nats.sum() / math.log(2) / bytes_each.sum()),
            results=Results(
                kind="validation",
                units={"n": n, "answers": _hash(self._ids, self._owner)},
                per_unit={"val_loss": nats / tokens},
                details={"tokens": tokens},
            ),
        )


def _hash(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
