"""HellaSwag accuracy: which of four endings does the model find likeliest? Zellers et al. 2019, arXiv:1905.07830."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gpt2lab.data.hellaswag_items import Item, Question, Style, tokenize
from gpt2lab.data.tokenizer import NUM_TOKENS
from gpt2lab.model import GPT
from gpt2lab.parallel import Strategy
from gpt2lab.runtime import Runtime

METRICS = ("acc", "acc_norm", "acc_token_norm")


@dataclass(frozen=True)
class HellaSwag:
    """The items, tokenised once in both styles."""

    labels: np.ndarray  # (N,)
    questions: dict[Style, list[Question]]
    strategy: Strategy
    runtime: Runtime

    @staticmethod
    def of(items: list[Item], *, strategy: Strategy, runtime: Runtime) -> HellaSwag:
        """Tokenise the items."""
        return HellaSwag(
            labels=np.array([item.label for item in items]),
            questions={
                "harness": [tokenize(item, "harness") for item in items],
                "tutorial": [tokenize(item, "tutorial") for item in items],
            },
            strategy=strategy,
            runtime=runtime,
        )

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float | int | None] | None:
        """Return three accuracies with their standard errors; all processes share the work and get the result.

        `acc`: highest sum of log-probabilities. `acc_norm`: per byte of the ending. `acc_token_norm`: per token, on
        the tutorial's text. Log-probabilities are fp32, over the 50257 real ids only. None if `interrupted`, asked
        before each item, told all to stop.
        """
        count = len(self.labels)
        correct = np.zeros((len(METRICS), count))
        was_training = model.training
        model.eval()
        try:
            for first in range(0, count, self.runtime.world_size):
                if interrupted():
                    return None
                index = first + self.runtime.rank
                if index < count:
                    correct[:, index] = self._judge(index, model)
        finally:
            model.train(was_training)
        correct = np.sum(
            self.runtime.gather(correct), axis=0
        )  # one process has each item, others 0
        result: dict[str, float | int | None] = {"n": count}
        for name, hits in zip(METRICS, correct, strict=True):
            result[name] = float(hits.mean())
            result[f"{name}_se"] = float(hits.std(ddof=1) / math.sqrt(count)) if count > 1 else None
        return result

    def _judge(self, index: int, model: GPT) -> list[bool]:
        """Tell for each metric whether it picks the true ending of one item."""
        question, lineage = self.questions["harness"][index], self.questions["tutorial"][index]
        with torch.inference_mode(), self.strategy.autocast():
            sums = _score(model, question)
            per_byte = sums / np.maximum(question.ending_bytes, 1)
            per_token = _score(model, lineage) / [max(len(e), 1) for e in lineage.endings]
        return [
            int(scores.argmax()) == self.labels[index] for scores in (sums, per_byte, per_token)
        ]


def _score(model: GPT, question: Question) -> np.ndarray:
    """Return the summed log-probability of each ending after the context, (4,) float64, in nats."""
    device = next(model.parameters()).device
    longest = model.config.context_length + 1
    rows = [(question.context + ending)[-longest:] for ending in question.endings]
    width = max(len(row) for row in rows)
    ids = torch.zeros(
        len(rows), width, dtype=torch.int64
    )  # padding on the right: causal, hence unseen
    mask = torch.zeros(len(rows), width - 1)
    for i, (row, ending) in enumerate(zip(rows, question.endings, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, max(0, len(row) - 1 - len(ending)) : len(row) - 1] = 1.0
    ids = ids.to(device)
    logits = model.logits(ids[:, :-1])[..., :NUM_TOKENS].float()  # (4, width - 1, V_real)
    log_probabilities = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    return (log_probabilities.cpu() * mask).double().sum(dim=1).numpy()  # sync
