"""HellaSwag accuracy: which of four endings has the highest probability? Zellers et al. 2019, arXiv:1905.07830.

The tasks of lm-eval and CORE use the same rows and batches (interop/scoring.py).
"""

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from gpt2lab.config.schema import HellaSwagMetrics
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import NonFiniteError
from gpt2lab.evaluation.hellaswag_items import STYLES, Questions, Style
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.model.attention_backend import for_changing_shapes
from gpt2lab.model.gpt import GPT, evaluating
from gpt2lab.runs.console import counted

METRICS = ("acc", "acc_norm", "acc_token_norm")


class HellaSwag:
    """The items in rows and batches, divided among the ranks."""

    def __init__(
        self,
        questions: Questions,
        *,
        context_length: int,
        strategy: Strategy,
        metrics: HellaSwagMetrics = "all",
        batch_tokens: int | None = None,
    ) -> None:
        self.num_items, self._context_length = len(questions), context_length
        self._questions, self._strategy = questions, strategy
        self._styles: tuple[Style, ...] = STYLES if metrics == "all" else (metrics,)
        sequences = (item for style in self._styles for item in questions.sequences[style])
        rows = make_rows(sequences, context_length=context_length)
        budget = batch_tokens or BATCH_TOKENS[strategy.device.type]
        self._batches = cut_batches(rows, batch_tokens=budget)

    def measure(
        self, model: GPT, *, interrupted: Callable[[], bool] = lambda: False
    ) -> Results | None:
        """Return which items each metric gets right; each rank computes a part, and all get the result.

        `acc`: highest sum of log-probabilities. `acc_norm`: per character of the ending, as the reference harness
        does. `acc_token_norm`: per scored token, on the tutorial's text, so it costs as much as the other two together.
        Log-probabilities are fp32, over the real ids only. Of equal scores the first ending is taken, as numpy's
        argmax does for the harness. None if `interrupted`, called before each batch, returned True.

        Raises: NonFiniteError.
        """
        shape = (len(self._styles), len(self._questions), 4)
        found = np.zeros(math.prod(shape))
        sums = score_batches(model, self._strategy, self._batches, score, found, interrupted)
        if sums is None:
            return None
        by_style = sums.reshape(shape)
        by_name = dict(zip(self._styles, by_style, strict=True))
        return judge(self._questions, by_name, context_length=self._context_length)


def judge(questions: Questions, sums: dict[Style, np.ndarray], *, context_length: int) -> Results:
    """Turn the summed log-probabilities (N, 4) of each text into right or wrong, 1.0 or 0.0, for its metrics.

    Of an ending that is longer than the context only the last `context_length` tokens have one.
    """
    scores = {}
    # An ending that was all brackets has no characters.
    with np.errstate(divide="ignore", invalid="ignore"):
        if "harness" in sums:
            scores["acc"] = sums["harness"]
            scores["acc_norm"] = sums["harness"] / questions.ending_chars
        if "tutorial" in sums:
            scores["acc_token_norm"] = sums["tutorial"] / np.minimum(
                questions.lengths("tutorial")[:, 1:], context_length
            )
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
    """Return the event's numbers: n, and each accuracy with its standard error, None if not measured."""
    summary: dict[str, float | int | None] = {"n": results.n}
    for name in METRICS:
        right = results.per_unit.get(name)
        found = None if right is None else estimate_mean(right)
        summary[name], summary[f"{name}_se"] = (found.mean, found.se) if found else (None, None)
    return summary


# Tokens of one forward pass, padding included. Fixed by the device, never by the world size: the same batches
# everywhere, hence the same sums.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
# Of a batch's longest row; for shorter rows padding would cost more than another batch.
_SHORTEST = 0.85
_MULTIPLE_OF = {"cpu": 1, "cuda": 8}  # widths on which masked attention is fast


@dataclass(frozen=True)
class ScoredRow:
    """One context and the endings that share it; `slots` are their numbers among all endings."""

    context: np.ndarray  # (n,) ids, n >= 1
    endings: tuple[np.ndarray, ...]
    slots: tuple[int, ...]

    def __len__(self) -> int:
        """Count the positions; an ending's last token is only ever a target."""
        return len(self.context) + sum(max(len(ending) - 1, 0) for ending in self.endings)


def make_rows(sequences: Iterable[Sequence[np.ndarray]], *, context_length: int) -> list[ScoredRow]:
    """Put each context and its endings into one row, or into one an ending where the model's context is too short.

    As in the reference harness, context and ending are cut on the left to the last `context_length` + 1 tokens (the
    last is only a target). A cut depends on the ending's length, so such endings have no common context.
    """
    longest, rows, slot = context_length + 1, [], 0
    for context, *endings in sequences:
        slots = tuple(range(slot, slot := slot + len(endings)))
        if len(context) + max(len(ending) for ending in endings) <= longest:
            rows.append(ScoredRow(context, tuple(endings), slots))
            continue
        for ending, own in zip(endings, slots, strict=True):
            kept = np.concatenate([context, ending])[-longest:]
            split = max(1, len(kept) - len(ending))
            rows.append(ScoredRow(kept[:split], (kept[split:],), (own,)))
    assert all(len(row.context) for row in rows), "nothing predicts the first token"
    return rows


Item = TypeVar("Item", bound=Sized)


def cut_batches(rows: Iterable[Item], *, batch_tokens: int) -> list[list[Item]]:
    """Return batches of rows of similar length, longest first, none above `batch_tokens` unless by a single row."""
    batches: list[list[Item]] = []
    for row in sorted(rows, key=len, reverse=True):
        width = len(batches[-1][0]) if batches else 0
        is_full = not batches or (len(batches[-1]) + 1) * width > batch_tokens
        if is_full or len(row) < _SHORTEST * width:
            batches.append([])
        batches[-1].append(row)
    return batches


def score_batches(
    model: GPT,
    strategy: Strategy,
    batches: Sequence[list[ScoredRow]],
    score: Callable[[GPT, list[ScoredRow]], tuple[np.ndarray, np.ndarray]],
    found: np.ndarray,
    interrupted: Callable[[], bool],
) -> np.ndarray | None:
    """Fill `found`, zeros (..., endings), with what `score` returns; each rank computes a part, and all get the result.

    None if `interrupted`, called before each batch, returned True.

    Raises: NonFiniteError: among such scores the first would always win.
    """
    runtime = strategy.runtime
    rank, world = runtime.rank, runtime.world_size
    with evaluating(model):
        for first in counted(range(0, len(batches), world), "batches"):
            if interrupted():
                return None
            for batch in batches[first : first + world][rank:][:1]:  # none in the last round
                with torch.inference_mode(), strategy.autocast(), for_changing_shapes():
                    slots, values = score(model, batch)
                found[..., slots] = values
    found = np.sum(runtime.gather(found), axis=0)  # one rank has each, the others have 0
    if not np.isfinite(found).all():
        raise NonFiniteError("scores are not finite: broken weights")
    return found


def score(model: GPT, rows: list[ScoredRow]) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of all endings in the rows and the summed log-probability of each, in nats, float64."""
    picked, ids, owners, slots = predict_endings(model, rows)
    nats = model.losses_of(picked, ids).double().cpu().numpy()  # (P,); sync
    return slots, -np.bincount(owners, weights=nats, minlength=len(slots))


def predict_endings(
    model: GPT, rows: list[ScoredRow]
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Return what predicts all P tokens of endings (P, C), their ids and endings (P,), and the endings' slots."""
    device = next(model.parameters()).device
    multiple = _MULTIPLE_OF[device.type]
    width = -(-len(rows[0]) // multiple) * multiple  # the first row is the longest
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(tokens)
    segments = np.full_like(tokens, -1)  # context 0, endings 1, 2, ..., padding -1
    # Of each scored token: where it is predicted, its id, its ending.
    sources, targets, owners = [], [], []
    slots = [slot for row in rows for slot in row.slots]
    owner = 0
    for number, row in enumerate(rows):
        n = end = len(row.context)
        tokens[number, :n], segments[number, :n] = row.context, 0
        positions[number, :n] = np.arange(n)
        for segment, ending in enumerate(row.endings, start=1):
            start, end = end, end + max(len(ending) - 1, 0)
            tokens[number, start:end] = ending[:-1]
            positions[number, start:end] = np.arange(n, n + end - start)
            segments[number, start:end] = segment
            predicted_at = np.concatenate([[n - 1], np.arange(start, end)])[: len(ending)]
            sources.append(number * width + predicted_at)
            targets.append(ending)
            owners.append(np.full(len(ending), owner))
            owner += 1
    stream = model.stream(  # (B, width, C)
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        see_own_text(torch.from_numpy(segments).to(device)),
    )
    ends = torch.from_numpy(np.concatenate(sources)).to(device)  # (P,)
    picked = model.ln_f(stream).flatten(0, 1)[ends]  # (P, C)
    ids = torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device)  # (P,)
    return picked, ids, np.concatenate(owners), np.array(slots)


def see_own_text(segments: torch.Tensor) -> torch.Tensor:
    """Return which positions attend to which, (B, T, T) bool: earlier ones of the context (0) and of their segment."""
    T = segments.size(1)
    earlier = torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()
    query, key = segments[:, :, None], segments[:, None, :]
    return earlier & ((key == 0) | (key == query))
