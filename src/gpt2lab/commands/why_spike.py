"""Name the samples behind a spike of the loss or of the gradient norm, and what the step is without them.

gpt2lab why-spike my_run --step 490
gpt2lab why-spike my_run
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.commands.replay import open_run
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import ConfigError, printable

if TYPE_CHECKING:
    from gpt2lab.lab.spike import Contribution, WithoutSample

_HEAD, _TAIL, _ROWS = 160, 60, 10  # characters of a text, lines of the table
_LITTLE = 0.8  # of the norm: if more is left without the worst sample, it does not explain the norm


@dataclass(frozen=True)
class WhySpike:
    """Rank the samples of a step by what they add to its gradient; nothing of the run is written."""

    run: str = argument("name of a run in checkpoints/, or its folder")
    step: int | None = option(None, "the step; default the largest spike in the log", least=1)
    worst: int = option(
        3, "number of worst samples to show; the step is also taken without each of them", least=1
    )
    data_dir: tuple[str, ...] = option((), "where the run's data are now, if they were moved")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Explain and print; return 1 if the steps before could not be replayed as they were."""
    flags = parse_flags(WhySpike, argv)
    from gpt2lab.runs import history

    run_dir = history.find_run(flags.run, checkpoint_dir=flags.checkpoint_dir)
    found = explain(run_dir, flags.step, worst=flags.worst, data_dir=flags.data_dir)
    print(json.dumps(found.as_json()) if flags.json else found.describe())
    return 0 if found.departure is None else 1


@dataclass(frozen=True)
class Sample:
    """A sample with where it is from and what it says."""

    place: str
    documents: tuple[int, ...]  # those that its targets are of; () where they are not known
    text: str | None
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Spike:
    """A step explained."""

    run: Path
    step: int
    how: str | None  # the step was chosen; None if it was named
    loss: float
    grad_norm: float
    parts: list[Contribution]  # largest projection first
    samples: dict[int, Sample]  # of the worst
    without: list[WithoutSample]
    departure: str | None  # of the replay from the log

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; numbers that are not finite are null."""
        found: dict[str, Any] = _finite(dataclasses.asdict(self) | {"run": str(self.run)})
        return found

    def describe(self) -> str:
        """Write it for people."""
        ordered = sorted(self.parts, key=lambda part: _largest_first(part.loss, part.loss))
        by_loss = {part.sample: number for number, part in enumerate(ordered, start=1)}
        chosen = f" ({self.how}, the largest in the log that can be replayed)" if self.how else ""
        loss, norm = _shown(self.loss), _shown(self.grad_norm)
        lines = [
            f"step {self.step} of {paths.display_path(self.run)}{chosen}",
            f"loss {loss}, gradient norm {norm}, {fmt.number_of(len(self.parts), 'sample')}: "
            + (self.departure or "as logged"),
        ]
        rows = [
            [
                f"{p.sample:,}",
                _shown(p.loss),
                str(by_loss[p.sample]),
                _shown(p.norm),
                _shown(p.projection),
                _shown(p.projection / self.grad_norm if self.grad_norm else math.nan, ".1%"),
            ]
            for p in self.parts[:_ROWS]
        ]
        header = ["sample", "loss", "rank by loss", "norm of its part", "along the gradient"]
        lines.append(fmt.table([*header, "share"], rows))
        if len(self.parts) > _ROWS:
            lines.append(f"and {len(self.parts) - _ROWS:,} samples that add less")
        for number, sample in self.samples.items():
            which = ""
            if len(sample.documents) == 1:
                which = f", document {sample.documents[0]:,}"
            elif sample.documents:
                which = f", documents {sample.documents[0]:,} to {sample.documents[-1]:,}"
            lines.append(f"sample {number:,}: {sample.place}{which}")
            if sample.text is not None:
                lines.append(f"  {sample.text}")
        lines += [self._in_words(one) for one in self.without]
        if len(self.parts) > 1 and not _has_finite(self.parts):
            lines.append(
                "no sample of the step has a finite loss, so the weights before it are the cause, not a sample"
            )
        left = self.without[0].grad_norm if self.without else 0.0
        if math.isfinite(self.grad_norm) and left > _LITTLE * self.grad_norm:
            lines.append("no single sample explains this norm")
        return "\n".join(lines)

    def _in_words(self, one: WithoutSample) -> str:
        said = "; ".join(self.samples[one.sample].patterns)
        return (
            f"without sample {one.sample:,}{f' ({said})' if said else ''} the norm is {_shown(one.grad_norm, '.3g')} "
            f"instead of {_shown(self.grad_norm, '.3g')}, the loss {_shown(one.loss)} instead of {_shown(self.loss)}"
        )


def explain(
    run_dir: Path, step: int | None, *, worst: int, data_dir: tuple[str, ...] = ()
) -> Spike:
    """Replay up to a step, and divide its gradient by sample."""
    from gpt2lab.commands.data_show import tokens_of_step
    from gpt2lab.lab.replay import Change, first_difference, without
    from gpt2lab.lab.spike import WithoutSample, contributions, patterns

    how = None
    if step is None:
        step, how = _choose(run_dir)
    # Before anything is computed: the data may have changed.
    tokens = tokens_of_step(run_dir, step, data_dir)
    replay = open_run(run_dir, range(step, step + 1), data_dir)
    departure = None
    replay.take_until(step - 1)
    if replay.departure is not None:
        first, name, _ = replay.departure
        departure = f"the replay departed from the log in step {first.event['step']}, in its {name}"
    logged, batch = replay.logged[step], replay.batch()
    parts = sorted(contributions(replay), key=lambda p: _largest_first(p.projection, p.norm))
    loss, norm = replay.measure(batch)
    measured = logged | _finite({"loss": loss, "grad_norm": norm})
    differs = first_difference(logged, measured, tolerance=replay.tolerance)
    if departure is None and differs is not None:
        departure = f"not as logged ({differs[1]} {logged[differs[1]]})"
    # Where no sample is finite, none is worse than another.
    chosen = parts[:worst] if _has_finite(parts) else []
    left = []
    for number in [part.sample for part in chosen if part.targets < batch.num_targets]:
        mask = replay.mask(step, Change(without_samples=frozenset({number})))
        left.append(WithoutSample(number, *replay.measure(without(batch, mask, step=step))))
    documents = tokens.documents()
    samples = {}
    for number in [part.sample for part in chosen]:
        row = number - batch.first_sample
        ids = tokens.windows[row, 1:].astype(np.int64)
        others = np.delete(tokens.windows[:, 1:], row, 0).astype(np.int64)
        samples[number] = Sample(
            tokens.places[row],
            tuple(np.unique(documents[row]).tolist()) if documents else (),
            None if tokens.tokenizer is None else _excerpt(tokens.tokenizer.decode(ids.tolist())),
            tuple(patterns(ids, others, tokens.tokenizer)),
        )
    replay.close()
    return Spike(run_dir, step, how, loss, norm, parts, samples, left, departure)


def _choose(run_dir: Path) -> tuple[int, str]:
    from gpt2lab.checkpoint import catalog
    from gpt2lab.lab.spike import FEWEST_BEFORE, largest_spike
    from gpt2lab.runs import history

    infos = catalog.list_checkpoints(run_dir)[0]
    if not infos:
        raise ConfigError(f"{paths.display_path(run_dir)}: it has no checkpoint to replay from")
    found = largest_spike(history.read_log(run_dir), after=infos[0].step)
    if found is None:
        raise ConfigError(
            f"{paths.display_path(run_dir)}: no step after its first checkpoint has {FEWEST_BEFORE} steps before it to "
            f"be compared with; name one with --step"
        )
    return found


def _has_finite(parts: list[Contribution]) -> bool:
    return any(math.isfinite(part.loss) for part in parts)


def _shown(value: float, layout: str = ".4f") -> str:
    return fmt.number(value if math.isfinite(value) else None, layout)


def _largest_first(value: float, known_by: float) -> tuple[bool, float]:
    """Order by a value, largest first; a sample whose number `known_by` is not finite before all."""
    return math.isfinite(known_by), -value if math.isfinite(value) else 0.0


def _excerpt(text: str) -> str:
    """Return the beginning and the end of a text on one line, control characters as codes."""
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} ... {text[-_TAIL:]}"
    return printable(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
