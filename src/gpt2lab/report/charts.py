"""The geometry of the charts on a page, which page.html writes as SVG. No torch.

Curves are drawn in an inner picture that is stretched to the size of the chart; ticks and labels are placed around it
in percent, so that text keeps its size on a narrow screen. page.js shows the values at the pointer, from JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpt2lab import fmt
from gpt2lab.report.curves import AXES, FEWEST_JOINED, Axis, Curves, Line, Panel, panels_of

WIDTH, HEIGHT = 4000, 1000  # of the inner picture, in its units
_COLOURS = 7  # classes c0 ... c6 of page.css
_LARGEST = 1e30  # value that is drawn; the smallest one on a logarithmic scale is its inverse


@dataclass(frozen=True)
class Picture:
    """A chart over one axis; places are in percent of its width and height."""

    axis: Axis
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    notes: list[tuple[float, str]]  # height, text
    marks: list[tuple[str, str]]  # CSS classes, path of the inner picture
    hover: str  # JSON for page.js


@dataclass(frozen=True)
class Chart:
    """A chart with its legend, [(colour, name)], and one picture for each axis."""

    title: str
    height: int  # pixels
    legend: list[tuple[str, str]]
    pictures: list[Picture]


@dataclass(frozen=True)
class Scale:
    """Maps values to shares of a length, 0 at its low end."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(
        cls,
        values: np.ndarray,
        *,
        is_log: bool = False,
        low: float | None = None,
        margin: float = 0.04,
    ) -> Scale:
        """Return a scale that covers all values (positive ones if logarithmic); it begins at `low`, if given."""
        known = values[np.isfinite(values) & (np.abs(values) < _LARGEST)]
        known = known[known > 1 / _LARGEST] if is_log else known
        least, most = (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
        if is_log:
            ratio = max((most / least) ** margin, 1.05)
            return cls(least / ratio, most * ratio, is_log=True)
        least = least if low is None else min(low, most)
        span = most - least
        if span <= max(1e-30, 1e-12 * abs(most)):  # a flat line
            span, margin = abs(most) or 1.0, 1.0
        return cls(least - margin * span if low is None else least, most + margin * span)

    def at(self, values: Any) -> np.ndarray:
        """Return the shares; NaN for a value that cannot be drawn."""
        known = np.asarray(values, float)
        has_place = np.abs(known) < _LARGEST
        if self.is_log:
            has_place &= known > 1 / _LARGEST
        known = np.where(has_place, known, np.nan)
        if self.is_log:
            shares: np.ndarray = np.log(known / self.low) / math.log(self.high / self.low)
            return shares
        return (known - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, text) of about five round values."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            factors = (1,) if last - first > 3 else (1, 2, 5)
            powers = range(first, last + 1, -(-(last - first) // 6))
            values = [factor * 10.0**power for power in powers for factor in factors]
            values = [value for value in values if self.low <= value <= self.high]
            if len(values) > 1:
                return _labelled(values)
        # A logarithmic scale that is too short for two round values has linear ticks.
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(f * unit for f in (1, 2, 2.5, 5, 10) if f * unit >= 0.999 * rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return _labelled([i * step for i in range(first, last + 1)])

    def percent(
        self, labelled: Sequence[tuple[float, str]], *, down: bool = False
    ) -> list[tuple[float, str]]:
        """Return labels with their places in percent; from the upper end if `down`."""
        shares = [float(self.at(value)) for value, _ in labelled]
        return [
            (round(100 * (1 - share if down else share), 2), text)
            for share, (_, text) in zip(shares, labelled, strict=True)
        ]


def _labelled(values: Sequence[float]) -> list[tuple[float, str]]:
    """Return values with their texts, with the fewest digits that make the texts differ."""
    texts: list[str] = []
    for more in range(12):
        texts = [_short(value, more) for value in values]
        if len(set(texts)) == len(texts):
            break
    return list(zip(values, texts, strict=True))


def _short(value: float, more: int) -> str:
    """Write a round number: 0.0005, 2.5, 2500, 12.5K; `more` digits than these. Rounding errors do not show."""
    if value < 10_000:
        return f"{value:.{6 + more}g}"
    return fmt.count(value, digits=3 + more)


def charts_of(runs: Sequence[Curves]) -> list[Chart]:
    """Return the charts of one run, or of several over each other."""
    panels = panels_of(runs)
    return [_chart(p, runs, height=340 if p is panels[0] else 240) for p in panels]


def colour_of(number: int) -> str:
    """Return the CSS class with the colour of a run, by its place among the runs of a page."""
    return f"c{number % _COLOURS}"


def _class_of(line: Line) -> str:
    colour = "grey" if line.colour is None else colour_of(line.colour)
    return f"{colour} dashed" if line.is_dashed else colour


def _chart(panel: Panel, runs: Sequence[Curves], *, height: int) -> Chart:
    lines = [line for line in panel.lines if len(line.curve)]
    values = [np.array([value for value, _ in panel.references])]
    for line in lines:
        error = 0.0 if line.curve.error is None else line.curve.error
        values += [line.curve.y - error, line.curve.y + error]
    y = Scale.over(np.concatenate(values), is_log=panel.is_log, low=panel.low)
    legend = [(_class_of(line), line.name) for line in lines if line.name is not None]
    if panel.by_run:
        legend = [(colour_of(i), run.name) for i, run in enumerate(runs)]
    shown = legend if len(legend) > 1 else []
    if any(len(run.resumes["step"]) for run in runs):
        shown = [*shown, ("dotted", "resumed")]
    pictures = [_picture(axis, replace(panel, lines=lines), runs, y) for axis in AXES]
    return Chart(panel.title, height, shown, pictures)


def _picture(axis: Axis, panel: Panel, runs: Sequence[Curves], y: Scale) -> Picture:
    places = [np.zeros(1), *(line.curve.x[axis] for line in panel.lines)]
    x = Scale.over(np.concatenate(places), margin=0.0)
    x_ticks, y_ticks = x.percent(x.ticks()), y.percent(y.ticks(), down=True)
    marks = [("grid", "".join(f"M0,{HEIGHT * at / 100:.0f}H{WIDTH}" for at, _ in y_ticks))]
    for number, run in enumerate(runs):
        resumed = x.at(run.resumes[axis]) * WIDTH
        path = "".join(f"M{place:.0f},0V{HEIGHT}" for place in resumed if np.isfinite(place))
        marks.append((f"{colour_of(number)} dotted", path))
    notes = y.percent(panel.references, down=True)
    marks.append(("reference", "".join(f"M0,{10 * at:.0f}H{WIDTH}" for at, _ in notes)))
    for line in panel.lines:
        marks += _marks(line, x.at(line.curve.x[axis]), y)
    hover = {
        "axis": axis,
        "low": x.low,
        "high": x.high,
        "series": [_values(line, axis) for line in panel.lines if line.name is not None],
    }
    marks = [(classes, path) for classes, path in marks if path]
    return Picture(axis, x_ticks, y_ticks, notes, marks, json.dumps(hover))


def _marks(line: Line, x: np.ndarray, scale: Scale) -> list[tuple[str, str]]:
    curve, colour = line.curve, _class_of(line)
    y = scale.at(curve.y)
    known = np.isfinite(x) & np.isfinite(y)
    across, down = (WIDTH * x[known]).round(), (HEIGHT * (1 - y[known])).round()
    places = [f"{a:.0f},{b:.0f}" for a, b in zip(across, down, strict=True)]
    # Lines of length 0: with round caps they are circles, however the picture is stretched.
    dots = "".join(f"M{place}h0" for place in places)
    path = "M" + "L".join(places) if places else ""
    if line.kind != "points":
        return [(f"{colour} points", dots) if len(places) == 1 else (f"{colour} {line.kind}", path)]
    error = np.zeros(len(curve)) if curve.error is None else curve.error
    ends = [HEIGHT * (1 - scale.at(curve.y + s * error)[known]) for s in (-1, 1)]
    bars = zip(across, *ends, strict=True)
    errors = "".join(f"M{a:.0f},{low:.0f}V{high:.0f}" for a, low, high in bars)
    marks = [(f"{colour} error", errors), (f"{colour} points", dots)]
    return [(f"{colour} line", path), *marks] if len(places) >= FEWEST_JOINED else marks


def _values(line: Line, axis: Axis) -> dict[str, Any]:
    curve = line.curve
    known = np.isfinite(curve.x[axis]) & np.isfinite(curve.y)
    values: dict[str, Any] = {"name": line.name, "colour": _class_of(line)}
    values["x"] = [float(f"{x:.10g}") for x in curve.x[axis][known]]
    values["y"] = [float(f"{y:.5g}") for y in curve.y[known]]
    if curve.error is not None:
        values["error"] = [float(f"{error:.2g}") for error in curve.error[known]]
    return values
