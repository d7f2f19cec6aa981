"""The curves of runs: few points of each, with their places by step, tokens and hours, and the panels that they share.

The page (charts.py) and the pictures of `plot` (plots.py) draw the same panels. No torch.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2lab.errors import ConfigError
from gpt2lab.runs import history

Axis = Literal["step", "tokens", "hours"]
AXES: tuple[Axis, ...] = ("step", "tokens", "hours")

_POINTS = 400  # of a curve: more do not show on a page
FEWEST_JOINED = 5  # measured points: a line between fewer misleads
_WINDOW = 25  # a smoothed curve is a median over this part of a run
_LOOKED_AT = 2000  # values of such a window: more do not move the median by a pixel

# What GPT-2 124M reaches, by the same rule as the curve beside it (reference harness 0.4, acc_norm; the tutorial
# lineage's own protocol), and GPT-3 124M as published, which is another protocol (Brown et al. 2020, table H.1).
REFERENCES = {
    "acc_norm": [(0.3114, "GPT-2 124M"), (0.337, "GPT-3 125M, as published, other protocol")],
    "acc_token_norm": [(0.2955, "GPT-2 124M, tutorial lineage")],
}


@dataclass(frozen=True)
class Curve:
    """Points of a curve: their places on each axis, their values, and the standard errors of measured ones."""

    x: dict[Axis, np.ndarray]
    y: np.ndarray
    error: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Trace:
    """A noisy number of every step: the extremes of equal parts of the run, where no spike is lost, and medians."""

    raw: Curve
    smooth: Curve


@dataclass(frozen=True)
class Curves:
    """The curves of a run, along the steps that led to its newest weights."""

    name: str
    loss: Trace
    grad_norm: Trace
    tokens_per_second: Trace
    rates: dict[str, Curve]  # {optimizer: its learning rate}
    validation: Curve
    hellaswag: dict[str, Curve]  # {metric: accuracies}
    resumes: dict[Axis, np.ndarray]
    tokenizer: str  # its record in run.json
    # Bits/byte of the validation text for each nat/token; None where it is not known.
    bits_per_nat: float | None


@dataclass(frozen=True)
class Line:
    """A curve of a panel; `name` is None for one that the legend and the pointer leave out."""

    name: str | None
    colour: int | None  # the place of its run among those drawn; None: grey
    kind: Literal["raw", "line", "points"]
    curve: Curve
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves that share a vertical axis."""

    title: str
    lines: list[Line]
    references: Sequence[tuple[float, str]] = ()  # values to draw a level at, with their names
    is_log: bool = False  # by default, the vertical axis
    low: float | None = None  # the lower end of the vertical axis
    by_run: bool = False  # whether the legend names runs instead of lines


def read_curves(run_dir: Path, log: history.Log | None = None, name: str | None = None) -> Curves:
    """Return the curves of a run; its log is read if it is not given, and `name` is by default that of the folder.

    Raises: ConfigError if it has taken no step.
    """
    log = history.read_log(run_dir) if log is None else log
    if not len(log.numbers):
        raise ConfigError(f"{run_dir}: has taken no step; nothing to draw")
    places, evals = _Places(log), log.current("eval")
    per_byte = [
        event["bits_per_byte"] / event["val_loss"]
        for event in evals.values()
        if event.get("bits_per_byte") and event["val_loss"]
    ]
    rates = {name: places.spread(field) for name, field in (("AdamW", "lr"), ("Muon", "muon_lr"))}
    scores = log.current("hellaswag")
    measured = {metric: places.measured(scores, metric) for metric in REFERENCES}
    return Curves(
        name=name or run_dir.name,
        loss=places.trace("loss"),
        grad_norm=places.trace("grad_norm"),
        tokens_per_second=places.trace("tokens_per_second"),
        rates={name: rate for name, rate in rates.items() if len(rate)},
        validation=places.measured(evals, "val_loss"),
        hellaswag={metric: curve for metric, curve in measured.items() if len(curve)},
        resumes=places.of(event["step"] for event in log.of_kind("resume")),
        tokenizer=str((history.read_json(run_dir / "run.json") or {}).get("tokenizer")),
        bits_per_nat=per_byte[-1] if per_byte else None,
    )


def panels_of(runs: Sequence[Curves]) -> list[Panel]:
    """Return the panels of one run, or of several over each other: loss, HellaSwag, learning rate, norm, speed."""
    several = len(runs) > 1
    numbered = list(enumerate(runs))
    unit, factors = _unit_of(runs)
    losses = [
        line for i, run in numbered for line in _loss_lines(run, i, factors[i], several=several)
    ]
    title = f"loss, {unit}{'; dots: validation' if several else ''}"
    panels = [Panel(title, losses, by_run=several)]
    for metric, references in REFERENCES.items():
        scores = [
            Line(run.name if several else "accuracy", i, "points", run.hellaswag[metric])
            for i, run in numbered
            if metric in run.hellaswag
        ]
        if scores:
            panels.append(Panel(f"HellaSwag {metric} ± standard error", scores, references))
    rates = [
        Line(
            ", ".join([run.name] * several + [optimizer] * (len(run.rates) > 1 or not several)),
            *(i, "line", rate),
            is_dashed=place > 0,
        )
        for i, run in numbered
        for place, (optimizer, rate) in enumerate(run.rates.items())
    ]
    names = [run.name if several else "running median" for run in runs]
    norms = [line for i, run in numbered for line in _trace_lines(names[i], run.grad_norm, i)]
    speeds = [
        line for i, run in numbered for line in _trace_lines(names[i], run.tokens_per_second, i)
    ]
    return [
        *panels,
        Panel("learning rate", rates, low=0.0),
        Panel("gradient norm", norms, is_log=True),
        Panel("tokens/s", speeds, low=0.0),
    ]


def _unit_of(runs: Sequence[Curves]) -> tuple[str, list[float]]:
    """Return the unit in which losses can be drawn over each other, and the factor of each run from nats/token."""
    factors = [run.bits_per_nat for run in runs]
    if len({run.tokenizer for run in runs}) == 1:
        return "nats/token", [1.0] * len(runs)
    if None in factors:
        return "nats/token, of different tokenizers: not comparable", [1.0] * len(runs)
    unit = "bits/byte (tokenizers differ; training by the tokens per byte of the validation text)"
    return unit, [factor for factor in factors if factor is not None]


def _loss_lines(run: Curves, number: int, factor: float, *, several: bool) -> list[Line]:
    def scaled(curve: Curve) -> Curve:
        error = None if curve.error is None else curve.error * factor
        return Curve(curve.x, curve.y * factor, error)

    prefix = f"{run.name}, " if several else ""
    loss = Trace(scaled(run.loss.raw), scaled(run.loss.smooth))
    return [
        *_trace_lines(f"{prefix}training, running median", loss, number if several else None),
        Line(f"{prefix}validation ± standard error", number, "points", scaled(run.validation)),
    ]


def _trace_lines(name: str, trace: Trace, colour: int | None) -> list[Line]:
    return [Line(None, colour, "raw", trace.raw), Line(name, colour, "line", trace.smooth)]


class _Places:
    """The places of the current steps of a log on each axis; hours are those spent in steps."""

    def __init__(self, log: history.Log) -> None:
        self._log = log
        self._tokens = log.column("tokens")
        self._begin = (0, 0.0)
        begin = next(iter(log.of_kind("begin")), {"step": 0})
        if len(log.numbers) and 0 < begin["step"] < log.numbers[0]:
            # A branch begins with the tokens of the run that it is a branch of, at hour 0.
            before = (log.numbers[0] - begin["step"]) * begin["tokens_per_step"]
            self._begin = (begin["step"], self._tokens[0] - before)
        hours = np.nan_to_num(log.column("step_seconds"), copy=False)
        self._hours = np.cumsum(hours, out=hours)
        self._hours /= 3600

    def of(self, steps: Iterable[float]) -> dict[Axis, np.ndarray]:
        x, numbers = np.fromiter(steps, float), self._log.numbers
        tokens = np.interp(
            x, np.append(self._begin[0], numbers), np.append(self._begin[1], self._tokens)
        )
        hours = np.interp(x, numbers, self._hours, left=0.0)
        return {"step": x, "tokens": tokens, "hours": hours}

    def spread(self, field: str) -> Curve:
        steps, values = self._known(field)
        chosen = spread(range(len(values)), _POINTS)
        return Curve(self.of(steps[chosen]), values[chosen])

    def trace(self, field: str) -> Trace:
        steps, values = self._known(field)
        sharp, even = extremes(values), np.array(spread(range(len(values)), _POINTS), int)
        smooth = running_medians(values, even)
        raw = Curve(self.of(steps[sharp]), values[sharp])
        return Trace(raw, Curve(self.of(steps[even]), smooth))

    def measured(self, events: Mapping[int, Mapping[str, Any]], metric: str) -> Curve:
        """Return at most 400 evaluations that have a metric, with their standard errors."""
        known = [step for step in sorted(events) if events[step].get(metric) is not None]
        known = spread(known, _POINTS)
        errors = [events[step].get(f"{metric}_se") or 0.0 for step in known]
        return Curve(
            self.of(known),
            np.array([events[step][metric] for step in known], float),
            np.array(errors, float),
        )

    def _known(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps in which a field is finite, and the values there."""
        values = self._log.column(field)
        known = np.isfinite(values)
        return self._log.numbers[known], values[known]


def spread(places: range | list[int], count: int) -> list[int]:
    """Return at most `count` of the places at equal distances, with the first and the last."""
    if len(places) <= count:
        return list(places)
    return [places[round(i * (len(places) - 1) / (count - 1))] for i in range(count)]


def running_medians(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the median around each place, over a 25th of all values, or over 2,000 random ones of these.

    Near the beginning, where a loss falls fast, the window is shorter, so that it stays centred.
    """
    half = len(values) // (2 * _WINDOW)
    chosen = np.random.RandomState(0).random(_LOOKED_AT)  # in a window of width 1

    def window(place: int, reach: int) -> np.ndarray:
        begin, width = place - reach, min(2 * reach + 1, len(values) - place + reach)
        if width <= _LOOKED_AT:
            return values[begin : begin + width]
        return values[begin + (chosen * width).astype(int)]

    return np.array([np.median(window(place, min(half, place))) for place in at.tolist()])


def extremes(values: np.ndarray) -> np.ndarray:
    """Return the places of the smallest and the largest value of each of 400 equal parts, ascending."""
    if len(values) <= 2 * _POINTS:
        return np.arange(len(values))
    found: set[int] = set()
    bounds = np.linspace(0, len(values), _POINTS + 1).astype(int).tolist()
    for begin, end in itertools.pairwise(bounds):
        stretch = values[begin:end]
        found |= {begin + int(stretch.argmin()), begin + int(stretch.argmax())}
    return np.array(sorted(found))
