"""What each sample of a step adds to its loss and gradient, and what is unusual about its tokens."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from gpt2lab.checkpoint.state import WINDOW
from gpt2lab.lab.replay import Replay
from gpt2lab.model.rng import fold_seed
from gpt2lab.optim.optimizers import sum_of_squares
from gpt2lab.runs.history import Log
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.training.health import LEAST_SPREAD

FEWEST_BEFORE = 8  # steps before one that is judged; the trainer waits longer, because it acts
_LONGEST_CYCLE = 16  # tokens


@dataclass(frozen=True)
class Contribution:
    """One sample's part in a step, with the weights before the update."""

    sample: int
    targets: int
    loss: float  # nats/token, mean over its own targets; 0 without targets
    norm: float  # L2 of its part of the gradient: its summed loss / targets of the step
    projection: float  # of this part on the direction of the gradient; all samples' add up to the gradient norm


@dataclass(frozen=True)
class WithoutSample:
    """The step without one sample: the mean over the targets that are left."""

    sample: int
    loss: float
    grad_norm: float


def contributions(replay: Replay) -> list[Contribution]:
    """Return each sample's part in the next step of a replay, in the order of samples; the weights stay.

    Each part takes a backward pass of its own, uncompiled. With dropout its masks are other draws than the step's.
    """
    components, batch = replay.components, replay.batch()
    parameters = [p for p in components.model.parameters() if p.requires_grad]
    full: list[torch.Tensor] = []

    def keep() -> None:
        full.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters)

    _, norm = replay.measure(batch, look=keep)
    seed = fold_seed(replay.start.config.data.seed, replay.state.step + 1)
    found: list[Contribution] = []
    for micro in batch.micro_batches:
        for row in range(len(micro.tokens)):
            one = slice(row, row + 1)
            torch.manual_seed(fold_seed(seed, micro.index))
            with _uncompiled(replay), components.strategy.autocast():
                loss = components.trained.forward(micro.tokens[one], micro.targets[one])
            (loss / batch.num_targets).backward()
            pairs = [
                (p.grad, g) for p, g in zip(parameters, full, strict=True) if p.grad is not None
            ]
            dot = sum(float((part.double() * whole.double()).sum()) for part, whole in pairs)
            own = math.sqrt(float(sum_of_squares([part for part, _ in pairs])))
            components.model.zero_grad()
            targets = int((micro.targets[one] >= 0).sum())
            found.append(
                Contribution(
                    sample=batch.first_sample + len(found),
                    targets=targets,
                    loss=loss.item() / max(1, targets),
                    norm=own,
                    projection=dot / norm if norm else 0.0,
                )
            )
    return found


def _uncompiled(replay: Replay) -> AbstractContextManager[None]:
    """A row alone would compile the regions of a deep model's step for another shape."""
    if replay.start.config.system.compile == "on":
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def largest_spike(log: Log, *, after: int) -> tuple[int, str] | None:
    """Return the step, of those after step `after`, whose loss or gradient norm stands out most, and how.

    A step that is not finite comes first; then the largest number of standard deviations above the mean of up to 128
    steps before, as the trainer judges spikes. None if no step has at least FEWEST_BEFORE before it.
    """
    best = (-math.inf, 0, "")
    for field, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = log.column(field)
        for place, step in enumerate(log.numbers.tolist()):
            recent = values[max(0, place - WINDOW) : place]
            recent = recent[np.isfinite(recent)]
            if step <= after:
                continue
            if not np.isfinite(values[place]):
                return step, f"{name} is not finite"
            if len(recent) < FEWEST_BEFORE:
                continue
            mean = recent.mean()
            z = (values[place] - mean) / max(recent.std(), LEAST_SPREAD * abs(mean), 1e-300)
            if z > best[0]:
                how = (
                    f"{name} {values[place]:.4g}, {z:.1f} standard deviations above the mean of the "
                    f"{len(recent)} steps before"
                )
                best = (z, step, how)
    return best[1:] if best[1] else None


def patterns(ids: np.ndarray, others: np.ndarray, tokenizer: Tokenizer | None) -> list[str]:
    """Say what is unusual about the ids of a sample, (T,), beside those of the step's other samples, (S - 1, T)."""
    found = []
    end = None if tokenizer is None else tokenizer.end_of_text
    run, token = longest_run(ids)
    if run >= max(16, len(ids) // 8):
        what = "end of text" if token == end else _shown(token, tokenizer)
        found.append(f"repetition of one token ({what}), {run:,} times")
    else:
        length, period = longest_cycle(ids)
        if length >= max(16, len(ids) // 4):
            found.append(f"a cycle of {period} tokens over {length:,} tokens")
    if end is not None and not found and (ends := int((ids == end).sum())) > len(ids) // 16 + 2:
        found.append(f"{ends:,} ends of text")
    if tokenizer is not None:
        text = tokenizer.decode(ids.tolist())
        marks = [c for c in text if not c.isspace()]
        broken = sum(c == "\ufffd" or not c.isprintable() for c in marks)
        letters = sum(c.isalpha() for c in marks)
        if marks and broken > len(marks) / 5:
            found.append(f"no text ({broken / len(marks):.0%} of its characters are not printable)")
        elif len(marks) >= 32 and letters < len(marks) / 4:
            found.append(f"few letters ({letters / len(marks):.0%} of its characters)")
    rare, usual = rare_shares(ids, others)
    if not found and rare > 2 * usual + 0.1:
        found.append(
            f"rare tokens ({rare:.0%} stand in no other sample of the step; usual are {usual:.0%})"
        )
    return found


def longest_run(ids: np.ndarray) -> tuple[int, int]:
    """Return the length of the longest run of one id, and the id."""
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [len(ids)]])
    place = int(np.diff(bounds).argmax())
    return int(bounds[place + 1] - bounds[place]), int(ids[bounds[place]])


def longest_cycle(ids: np.ndarray) -> tuple[int, int]:
    """Return the length of the longest stretch that repeats with a period of 2 to 16 tokens, and the period."""
    best = (0, 0)
    for period in range(2, min(_LONGEST_CYCLE, len(ids) // 2) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        gaps = np.diff(np.concatenate([[-1], differs, [len(ids) - period]])) - 1
        run = int(gaps.max())
        if run >= period and run + period > best[0]:
            best = (run + period, period)
    return best


def rare_shares(ids: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Return the share of a sample's tokens that stand in no other sample, and the median of that of the others."""
    rows = np.vstack([ids, others])
    used = np.zeros(int(rows.max()) + 1, np.int64)  # samples in which an id stands
    for row in rows:
        used[np.unique(row)] += 1
    shares = (used[rows] == 1).mean(axis=1)
    return float(shares[0]), float(np.median(shares[1:])) if len(others) else 1.0


def _shown(token: int, tokenizer: Tokenizer | None) -> str:
    return f"id {token}" if tokenizer is None else f"id {token}, {tokenizer.decode([token])!r}"
