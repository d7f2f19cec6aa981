"""What each sample of a step contributes to its loss and gradient, and what is unusual about its tokens."""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.store import WINDOW
from gpt2lab.errors import ConfigError, printable
from gpt2lab.lab.replay import Change, Replay, first_difference, open_replay, without
from gpt2lab.lab.step_tokens import RecordedRun, StepTokens, tokens_of_step
from gpt2lab.model.rng import fold_seed
from gpt2lab.optim.optimizers import sum_of_squares
from gpt2lab.runs.console import counted, doing
from gpt2lab.runs.events import finite
from gpt2lab.runs.history import Log
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.training.health import LEAST_SPREAD

FEWEST_BEFORE = 8  # steps before one that may be a spike; the trainer, which acts, waits for more
_LONGEST_CYCLE = 16  # tokens
_HEAD, _TAIL, _ROWS = 160, 60, 10  # characters of an excerpt, rows of the table
_LITTLE = 0.8  # of the norm: if more is left without the worst sample, that does not explain it


@dataclass(frozen=True)
class Contribution:
    """The contribution of one sample to a step, with the weights before the update."""

    sample: int
    targets: int
    loss: float  # nats/token, mean over its own targets; 0 without targets
    norm: float  # L2 of its part of the gradient: that of its summed loss / targets of the step
    projection: float  # of this part on the direction of the gradient; the sum over samples is the gradient norm


@dataclass(frozen=True)
class WithoutSample:
    """The step without one sample: the mean over the other targets."""

    sample: int
    loss: float
    grad_norm: float


def contributions(replay: Replay) -> list[Contribution]:
    """Return the contribution of each sample to the next step of a replay; the weights are not updated.

    Each takes a backward pass of its own, uncompiled. With dropout its masks differ from those of the step.
    """
    components, batch = replay.components, replay.batch()
    parameters = [p for p in components.model.parameters() if p.requires_grad]
    full: list[torch.Tensor] = []

    def keep() -> None:
        full.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters)

    _, norm = replay.measure(batch, look=keep)
    seed = fold_seed(replay.start.config.data.seed, replay.state.step + 1)
    compiled = replay.start.config.system.compile == "on"
    of_fp16 = components.strategy.loss_scale
    scale = 1.0 if of_fp16 is None else of_fp16.scale.item()
    found: list[Contribution] = []
    for micro in counted(batch.micro_batches, "micro-batches"):
        for row in range(len(micro.tokens)):
            one = slice(row, row + 1)
            torch.manual_seed(fold_seed(seed, micro.index))
            # Compiled, a single row would recompile the model for its shape.
            eager = (
                torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
            )
            with eager, components.strategy.autocast():
                loss = components.trained.forward(micro.tokens[one], micro.targets[one])
            (loss / batch.num_targets * scale).backward()
            pairs = [
                (p.grad, g) for p, g in zip(parameters, full, strict=True) if p.grad is not None
            ]
            dot = (
                sum(float((part.double() * whole.double()).sum()) for part, whole in pairs) / scale
            )
            own = math.sqrt(float(sum_of_squares([part for part, _ in pairs]))) / scale
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


def largest_spike(log: Log, *, after: int) -> tuple[int, str] | None:
    """Return the step after step `after` whose loss or gradient norm stands out most, and how.

    A non-finite step comes first, but none that only overflowed in fp16, whose loss scale takes care of it; then the
    largest number of standard deviations above the mean of up to 128 previous steps, as the trainer judges spikes.
    None if no step has at least FEWEST_BEFORE steps before it.
    """
    best = (-math.inf, 0, "")
    for field, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = log.column(field)
        for place, step in enumerate(log.numbers.tolist()):
            if step <= after:
                continue
            if not np.isfinite(values[place]):
                if field == "grad_norm" and (log.step(step) or {}).get("loss_scale") is not None:
                    continue
                return step, f"{name} is not finite"
            recent = values[max(0, place - WINDOW) : place]
            recent = recent[np.isfinite(recent)]
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


def patterns(ids: np.ndarray, others: list[np.ndarray], tokenizer: Tokenizer | None) -> list[str]:
    """Return what is unusual about the ids of a sample, compared with those of the other samples."""
    found = []
    end = None if tokenizer is None else tokenizer.end_of_text
    run, token = longest_run(ids)
    if run >= max(16, len(ids) // 8):
        what = f"id {token}" if tokenizer is None else f"id {token}, {tokenizer.decode([token])!r}"
        what = "end of text" if token == end else what
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
            found.append(
                f"not text ({broken / len(marks):.0%} of its characters are not printable)"
            )
        elif len(marks) >= 32 and letters < len(marks) / 4:
            found.append(f"few letters ({letters / len(marks):.0%} of its characters)")
    rare, usual = rare_shares(ids, others)
    if not found and rare > 2 * usual + 0.1:
        found.append(
            f"rare tokens ({rare:.0%} occur in no other sample of the step; {usual:.0%} is usual)"
        )
    return found


def longest_run(ids: np.ndarray) -> tuple[int, int]:
    """Return the length of the longest run of one id, and the id."""
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [len(ids)]])
    place = int(np.diff(bounds).argmax())
    return int(bounds[place + 1] - bounds[place]), int(ids[bounds[place]])


def longest_cycle(ids: np.ndarray) -> tuple[int, int]:
    """Return the length of the longest part that repeats with a period of 2 to 16 tokens, and the period."""
    best = (0, 0)
    for period in range(2, min(_LONGEST_CYCLE, len(ids) // 2) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        gaps = np.diff(np.concatenate([[-1], differs, [len(ids) - period]])) - 1
        run = int(gaps.max())
        if run >= period and run + period > best[0]:
            best = (run + period, period)
    return best


def rare_shares(ids: np.ndarray, others: list[np.ndarray]) -> tuple[float, float]:
    """Return the share of a sample's tokens that occur in no other sample, and the median share of the others."""
    rows = [ids, *others]
    used = np.bincount(np.concatenate([np.unique(row) for row in rows]))  # samples with an id
    shares = [(used[row] == 1).mean() for row in rows]
    return float(shares[0]), float(np.median(shares[1:])) if others else 1.0


@dataclass(frozen=True)
class Sample:
    """Where a sample is from, and its text."""

    place: str
    documents: tuple[int, ...]  # of its targets; () if unknown
    text: str | None
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class SpikeReport:
    """What each sample adds to a step, and the step without the worst ones."""

    run: Path
    step: int
    how: str | None  # why the step was chosen; None if it was given
    loss: float
    grad_norm: float
    parts: list[Contribution]  # largest projection first
    samples: dict[int, Sample]  # of the worst
    without: list[WithoutSample]
    departure: str | None  # how the replay departs from the log

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; non-finite numbers are null."""
        found: dict[str, Any] = finite(dataclasses.asdict(self) | {"run": str(self.run)})
        return found

    def describe(self) -> str:
        """Format the report."""
        ordered = sorted(self.parts, key=lambda part: _largest_first(part.loss, part.loss))
        by_loss = {part.sample: number for number, part in enumerate(ordered, start=1)}
        chosen = f" ({self.how}, the largest in the log that can be replayed)" if self.how else ""
        loss, norm = _number(self.loss), _number(self.grad_norm)
        lines = [
            f"step {self.step} of {paths.display_path(self.run)}{chosen}",
            f"loss {loss}, gradient norm {norm}, {fmt.number_of(len(self.parts), 'sample')}: "
            + (self.departure or "as logged"),
        ]
        rows = [
            [
                f"{p.sample:,}",
                _number(p.loss),
                str(by_loss[p.sample]),
                _number(p.norm),
                _number(p.projection),
                _number(p.projection / self.grad_norm if self.grad_norm else math.nan, ".1%"),
            ]
            for p in self.parts[:_ROWS]
        ]
        header = ["sample", "loss", "rank by loss", "norm of its part", "along the gradient"]
        lines.append(fmt.table([*header, "share"], rows))
        if len(self.parts) > _ROWS:
            lines.append(f"and {len(self.parts) - _ROWS:,} samples that contribute less")
        for number, sample in self.samples.items():
            which = ""
            if len(sample.documents) == 1:
                which = f", document {sample.documents[0]:,}"
            elif sample.documents:
                which = f", documents {sample.documents[0]:,} to {sample.documents[-1]:,}"
            lines.append(f"sample {number:,}: {sample.place}{which}")
            if sample.text is not None:
                lines.append(f"  {sample.text}")
        for one in self.without:
            patterns = "; ".join(self.samples[one.sample].patterns)
            lines.append(
                f"without sample {one.sample:,}{f' ({patterns})' if patterns else ''} the norm is "
                f"{_number(one.grad_norm, '.3g')} instead of {_number(self.grad_norm, '.3g')}, "
                f"the loss {_number(one.loss)} instead of {loss}"
            )
        if len(self.parts) > 1 and not _has_finite(self.parts):
            lines.append(
                "no sample of the step has a finite loss, so the weights before it are the cause, not a sample"
            )
        left = self.without[0].grad_norm if self.without else 0.0
        if math.isfinite(self.grad_norm) and left > _LITTLE * self.grad_norm:
            lines.append("no single sample explains this norm")
        return "\n".join(lines)


def explain(run: RecordedRun, step: int | None, *, worst: int) -> SpikeReport:
    """Replay up to a step and split its gradient by sample.

    `step`: None for the largest spike in the log.

    Raises: ConfigError, CheckpointError, DataError: see `open_replay`.
    """
    how = None
    if step is None:
        if not run.checkpoints:
            raise ConfigError(f"{run.name}: no checkpoint to replay from")
        spike = largest_spike(run.log, after=min(run.checkpoints))
        if spike is None:
            advice = "give one with --step" if run.log.numbers.size else "it has logged no step yet"
            raise ConfigError(
                f"{run.name}: no step after its first checkpoint has {FEWEST_BEFORE} steps before it to "
                f"compare with; {advice}"
            )
        step, how = spike
    # Before anything is computed: the data may have changed.
    tokens = tokens_of_step(run, step)
    replay = open_replay(run, first=step, last=step)
    departure = None
    replay.take_until(step - 1)
    if (first := replay.departure) is not None:
        departure = f"the replay departs from the log in step {first.step}, in its {first.quantity}"
    logged, batch = replay.logged[step], replay.batch()
    with doing("splitting the gradient by sample"):
        found = contributions(replay)
    parts = sorted(found, key=lambda p: _largest_first(p.projection, p.norm))
    loss, norm = replay.measure(batch)
    measured = logged | finite({"loss": loss, "grad_norm": norm})
    differs = first_difference(logged, measured, tolerance=replay.tolerance)
    if departure is None and differs is not None:
        departure = f"not as logged ({differs[1]} {logged[differs[1]]})"
    # If no sample is finite, none is worse than another.
    chosen = parts[:worst] if _has_finite(parts) else []
    left = []
    for number in [part.sample for part in chosen if part.targets < batch.num_targets]:
        mask = replay.mask(step, Change(without_samples=frozenset({number})))
        left.append(WithoutSample(number, *replay.measure(without(batch, mask, step=step))))
    replay.close()
    samples = _describe_samples(tokens, [part.sample for part in chosen])
    return SpikeReport(run.folder, step, how, loss, norm, parts, samples, left, departure)


def _describe_samples(tokens: StepTokens, numbers: list[int]) -> dict[int, Sample]:
    documents, tokenizer, rows = tokens.documents(), tokens.data.tokenizer, tokens.unpadded()
    samples = {}
    for number in numbers:
        row = number - tokens.first_sample
        ids, others = rows[row], rows[:row] + rows[row + 1 :]
        text = None if tokenizer is None else tokenizer.decode(ids.tolist())
        if text is not None:  # its beginning and its end
            long = len(text) > _HEAD + _TAIL
            text = printable(f"{text[:_HEAD]} ... {text[-_TAIL:]}" if long else text)
        samples[number] = Sample(
            tokens.places[row],
            tuple(np.unique(documents[row]).tolist()) if documents else (),
            text,
            tuple(patterns(ids, others, tokenizer)),
        )
    return samples


def _has_finite(parts: list[Contribution]) -> bool:
    return any(math.isfinite(part.loss) for part in parts)


def _number(value: float, layout: str = ".4f") -> str:
    return fmt.number(value if math.isfinite(value) else None, layout)


def _largest_first(value: float, known_by: float) -> tuple[bool, float]:
    """Return a sort key, largest value first; a sample whose number `known_by` is not finite comes before all."""
    return math.isfinite(known_by), -value if math.isfinite(value) else 0.0
