"""HellaSwag accuracy: which of four endings has the highest probability? Zellers et al. 2019, arXiv:1905.07830."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gpt2lab.config.schema import HellaSwagMetrics
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import NonFiniteError
from gpt2lab.evaluation.hellaswag_items import STYLES, Style
from gpt2lab.evaluation.hellaswag_tokens import Questions
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.scoring import BATCH_TOKENS, cut_batches, make_rows, score
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.model.attention_backend import for_changing_shapes
from gpt2lab.model.gpt import GPT

METRICS = ("acc", "acc_norm", "acc_token_norm")


class HellaSwag:
    """The items in rows and batches, shared by the ranks."""

    def __init__(
        self,
        questions: Questions,
        *,
        context_length: int,
        strategy: Strategy,
        runtime: Runtime,
        metrics: HellaSwagMetrics = "all",
        batch_tokens: int | None = None,
    ) -> None:
        self.num_items = len(questions)
        self._questions, self._strategy, self._runtime = questions, strategy, runtime
        self._styles: tuple[Style, ...] = STYLES if metrics == "all" else (metrics,)
        sequences = (item for style in self._styles for item in questions.sequences(style))
        rows = make_rows(sequences, context_length=context_length)
        budget = batch_tokens or BATCH_TOKENS[runtime.device.type]
        self._batches = cut_batches(rows, batch_tokens=budget)

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> Results | None:
        """Return which items each metric gets right; the ranks share the work and all get the result.

        `acc`: highest sum of log-probabilities. `acc_norm`: per character of the ending, as the reference harness
        does. `acc_token_norm`: per token, on the tutorial's text, so it costs as much as the other two together.
        Log-probabilities are fp32, over the real ids only. Of equal scores the first ending is taken, as numpy's
        argmax does for the harness. None if `interrupted`, asked before each batch, told all to stop.

        Raises: NonFiniteError: among such scores the first would always win.
        """
        world = self._runtime.world_size
        sums = np.zeros(len(self._styles) * 4 * len(self._questions))
        with self._strategy.evaluating(model):
            for first in range(0, len(self._batches), world):
                if interrupted():
                    return None
                mine = self._batches[first : first + world][self._runtime.rank :][:1]
                for batch in mine:  # one, or none in the last round
                    with (
                        torch.inference_mode(),
                        self._strategy.autocast(),
                        for_changing_shapes(),
                    ):
                        slots, scores = score(model, batch)
                    sums[slots] = scores
        sums = np.sum(self._runtime.gather(sums), axis=0)  # one rank has each, the others have 0
        if not np.isfinite(sums).all():
            raise NonFiniteError("HellaSwag scores are not finite: broken weights")
        by_style = sums.reshape(len(self._styles), len(self._questions), 4)
        return judge(self._questions, dict(zip(self._styles, by_style, strict=True)))


def judge(questions: Questions, sums: dict[Style, np.ndarray]) -> Results:
    """Turn the summed log-probabilities (N, 4) of each text into right or wrong, 1.0 or 0.0, for its metrics."""
    scores = {}
    # An ending that was all brackets has no characters.
    with np.errstate(divide="ignore", invalid="ignore"):
        if "harness" in sums:
            scores["acc"] = sums["harness"]
            scores["acc_norm"] = sums["harness"] / questions.ending_chars
        if "tutorial" in sums:
            scores["acc_token_norm"] = sums["tutorial"] / questions.lengths["tutorial"][:, 1:]
    return Results(
        kind="hellaswag",
        units={"n": len(questions), "items": questions.fingerprint},
        per_unit={
            name: (values.argmax(axis=1) == questions.labels).astype(np.float64)
            for name, values in scores.items()
        },
        details={
            "labels": questions.labels,
            **{f"{style}_nats": nats.astype(np.float32) for style, nats in sums.items()},
        },
    )


def summarize(results: Results) -> dict[str, float | int | None]:
    """Return the event's numbers: n, and each accuracy with its standard error, None where it was not asked for."""
    summary: dict[str, float | int | None] = {"n": results.n}
    for name in METRICS:
        right = results.per_unit.get(name)
        found = None if right is None else estimate_mean(right)
        summary[name], summary[f"{name}_se"] = (found.mean, found.se) if found else (None, None)
    return summary
