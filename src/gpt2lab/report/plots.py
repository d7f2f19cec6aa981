"""Pictures of a run's curves and of measured speeds. Needs matplotlib, no torch."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpt2lab import fmt
from gpt2lab.errors import ConfigError, system_errors_as
from gpt2lab.files import replace_durably
from gpt2lab.report.curves import FEWEST_JOINED, Axis, Curve, Curves, Panel, panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# The colours of text and axes in an SVG, on a light and on a dark page.
_INK, _INK_ON_DARK = "#656d76", "#9198a1"
_GREY = "#8c959f"

# The label of each axis; hours leave out evaluations and the pauses between starts.
X_LABELS: dict[Axis, str] = {"step": "step", "tokens": "tokens", "hours": "hours of steps"}


Table = Literal["speeds", "ablation", "compare", "ladder"]


@dataclass(frozen=True)
class View:
    """The horizontal axis of the curves, and which axes are logarithmic."""

    x: Axis = "step"
    log: Literal["x", "y", "xy"] | None = None

    def scale(self, axes: Axes) -> None:
        """Label the x axis of a panel and set the scales of both."""
        from matplotlib.ticker import LogFormatter

        axes.set_xlabel(X_LABELS[self.x])
        if "x" in (self.log or ""):
            axes.set_xscale("log", nonpositive="mask")
        else:
            axes.set_xlim(left=0)
        if "y" in (self.log or ""):
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(LogFormatter())
        axes.grid(alpha=0.25, which="both" if self.log else "major")
        axes.spines[["top", "right"]].set_visible(False)


def draw(runs: list[Curves], path: Path, view: View, *, only_loss: bool = False) -> None:
    """Draw one or several runs over each other into a PNG, or an SVG for light and dark pages.

    Raises: ConfigError if matplotlib is missing or the file cannot be written.
    """
    _write(_figure(runs, view, only_loss=only_loss), path)


def draw_table(kind: Table, file: Path, path: Path, view: View) -> None:
    """Draw what a JSON file holds: measured speeds, an ablation over seeds, `compare --json`, or a ladder.

    Raises: ConfigError if matplotlib is missing, the file cannot be read or the picture cannot be written.
    """
    draw, otherwise, fix = {
        "speeds": (_speeds, "no table of speeds", "docs/benchmarks.json is one"),
        "ablation": (_ablation, "no table of an ablation", "gpt2lab ablate writes it"),
        "compare": (
            _comparison,
            "no comparison with intervals",
            "gpt2lab compare --json prints one of groups of runs, or with --explain",
        ),
        "ladder": (_ladder, "no results of a ladder", "gpt2lab ladder fit writes them"),
    }[kind]
    try:
        figure = draw(json.loads(file.read_text()), view)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{file}: {otherwise} ({_reason(error)}); {fix}") from error
    _write(figure, path)


def _speeds(found: dict[str, Any], view: View) -> Figure:
    sizes = found["tokens_per_second"]
    panels = [(name, list(speeds.items())) for name, speeds in sizes.items()]
    figure = _new_figure(9, 2.2 * -(-len(panels) // 2))
    for axes, (name, bars) in zip(_grid(figure, len(panels)), panels, strict=True):
        bars.sort(key=lambda bar: bar[1])
        colours = [_COLOURS[0] if label.startswith("gpt2lab") else _GREY for label, _ in bars]
        drawn = axes.barh([label for label, _ in bars], [speed for _, speed in bars], color=colours)
        axes.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=8)
        axes.set_title(f"{name} (tokens/s)", fontsize=10)
        axes.tick_params(labelsize=9)
        axes.set_xticks([])
        axes.margins(x=0.14)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    return figure


def _ablation(found: dict[str, Any], view: View) -> Figure:
    """Draw the validation loss of each setting, mean and standard error over its seeds.

    Beside it stand the differences to the baseline with their 95 % intervals, where the table has them.
    """
    settings, comparisons = found["settings"], found.get("comparisons", [])
    curves = {row["setting"]: row["curves"] for row in settings}
    intervals = {row["setting"]: _intervals(row) for row in comparisons}
    figure = _new_figure(14 if intervals else 9, 4.5)
    axes = figure.add_subplot(1, 2 if intervals else 1, 1)
    if intervals:
        label = f"last validation loss minus that of {settings[0]['setting']}, nats/token"
        _draw_differences(figure.add_subplot(1, 2, 2), intervals, label)
    for (setting, seeds), colour in zip(curves.items(), itertools.cycle(_COLOURS), strict=False):
        if None in seeds:
            label = f"{setting}, diverged in {seeds.count(None)} of {len(seeds)}"
            axes.plot([], [], color=colour, label=label)
            continue
        mean = mean_over_seeds(seeds)
        label = f"{setting}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        _draw_measured(axes, mean, view.x, color=colour, capsize=2, label=label)
    view.scale(axes)
    axes.set_ylabel("validation loss, nats/token")
    axes.set_title("mean ± standard error over seeds", fontsize=8, loc="right", color="#666666")
    if curves:
        axes.legend(fontsize=8, frameon=False)
    return figure


def _intervals(comparison: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Return {kind: (difference, low, high)} of the intervals that one comparison over seeds has."""
    units, seeds, sequential = (comparison[k] for k in ("over_units", "over_seeds", "sequential"))
    parts = {"confidence sequence": sequential} if sequential else {"over seeds (95 %)": seeds}
    if units:
        parts[f"over {units['unit']}s (95 %)"] = units
    ends = {k: (p["mean"], p["low"], p["high"]) for k, p in parts.items() if p}
    return {kind: end for kind, end in ends.items() if None not in end}


def _draw_differences(
    axes: Axes, settings: dict[str, dict[str, tuple[float, float, float]]], label: str
) -> None:
    kinds = list(dict.fromkeys(kind for intervals in settings.values() for kind in intervals))
    for kind, colour in zip(kinds, itertools.cycle(_COLOURS), strict=False):
        shift = 0.2 * (kinds.index(kind) - (len(kinds) - 1) / 2)
        drawn = [(i, s[kind]) for i, s in enumerate(settings.values()) if kind in s]
        means, lows, highs = np.array([ends for _, ends in drawn]).T
        rows = [i + shift for i, _ in drawn]
        # matplotlib 3.10 warns of arrays of one number.
        error = np.array([means - lows, highs - means]).tolist()
        style: dict[str, Any] = {"fmt": "o", "ms": 4, "capsize": 3, "color": colour}
        axes.errorbar(means, rows, xerr=error, label=kind, **style)
    axes.axvline(0, color=_GREY, lw=1, ls="--")
    axes.set_yticks(range(len(settings)), list(settings))
    axes.set_ylim(len(settings) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    if kinds:
        axes.legend(fontsize=8, frameon=False)


def _comparison(found: dict[str, Any], view: View) -> Figure:
    title = f"A  {found['a']}    B  {found['b']}"
    draw = _explanation if "explain" in found else _differences_of_groups
    return draw(found, title)


def _differences_of_groups(found: dict[str, Any], title: str) -> Figure:
    """Draw one panel for each metric, because units differ."""
    intervals = {name: _intervals(one) for name, one in found["metrics"].items()}
    figure = _new_figure(9, 1 + 1.6 * len(intervals))
    for number, (name, of_metric) in enumerate(intervals.items(), start=1):
        axes = figure.add_subplot(len(intervals), 1, number)
        unit = found["metrics"][name]["unit"]
        _draw_differences(axes, {name: of_metric}, f"B - A{f', {unit}' if unit else ''}")
    figure.suptitle(f"{title}    {len(found['seeds'])} seeds", fontsize=10)
    return figure


def _explanation(found: dict[str, Any], title: str) -> Figure:
    """Draw one panel for each split, with the parts of the difference and their intervals."""
    found = found["explain"]
    whole, unit = float(found["difference"]), found["unit"]
    splits = [(split["by"], split["groups"]) for split in found["splits"]]
    rows = [[_part(group, whole) for group in groups] for _, groups in splits]
    heights = [max(map(len, rows[place : place + 2])) for place in range(0, len(rows), 2)]
    figure = _new_figure(13, 1 + sum(0.8 + 0.22 * height for height in heights))
    for axes, (by, groups), parts in zip(_grid(figure, len(splits)), splits, rows, strict=True):
        places = range(len(parts))
        means, lows, highs, shares = np.array(parts).T
        label = "the group's share of the tokens"
        axes.barh(places, shares, height=0.6, color=_GREY, alpha=0.35, label=label)
        style: dict[str, Any] = {"fmt": "o", "ms": 4, "capsize": 3, "color": _COLOURS[0]}
        ends = np.array([means - lows, highs - means])
        axes.errorbar(
            means, places, xerr=ends, **style, label=f"its part, 95 % interval over {unit}s"
        )
        marks = [f"{g['name']}{' *' if g['stands_out'] else ''}" for g in groups]
        axes.set_yticks(places, marks, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color=_GREY, lw=1, ls="--")
        axes.set_title(by, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("part of B - A, nats/token", fontsize=8)
    names = figure.axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(f"{title}    B - A {whole:+.4f} nats/token", fontsize=10)
    return figure


def _part(group: dict[str, Any], whole: float) -> tuple[float, ...]:
    """Return a group's part, the ends of its interval, both the part where it has none, and its share of the whole."""
    part = float(group["part"])
    ends = (part if group[end] is None else float(group[end]) for end in ("part_low", "part_high"))
    return (part, *ends, float(group["tokens"]) * whole)


def _ladder(ladder: dict[str, Any], view: View) -> Figure:
    """Draw each rung's seeds, the fitted law with its 80 % band by size, and the predicted top rung."""
    rungs, curves, top = ladder["rungs"], ladder["curves"], ladder["prediction"]
    score = ladder["score"]
    figure = _new_figure(9, 4.5)
    axes = figure.add_subplot()
    for curve, colour in zip(curves, itertools.cycle(_COLOURS), strict=False):
        size = curve["parameters"]
        label = f"{fmt.count(size)} parameters"
        if top and size == top["parameters"]:
            label += ", predicted"
        axes.plot(curve["tokens"], curve["value"], color=colour, lw=1.2, label=label)
        axes.fill_between(curve["tokens"], curve["low"], curve["high"], color=colour, alpha=0.15)
        for rung in (rung for rung in rungs if rung["parameters"] == size):
            places = [rung["tokens"]] * len(rung["losses"])
            axes.plot(places, rung["losses"], "o", color=colour, ms=3, alpha=0.7)
    if top is not None:
        at = top["loss"]
        bounds = [[at["value"] - at["low"]], [at["high"] - at["value"]]]
        style: dict[str, Any] = {"color": _GREY, "capsize": 4, "fmt": "s", "ms": 4}
        axes.errorbar(
            [top["tokens"]], [at["value"]], bounds, **style, label="prediction, 80 % interval"
        )
    if score is not None:
        places = [top["tokens"]] * len(score["losses"])
        axes.plot(places, score["losses"], "x", color=_COLOURS[1], ms=6, label="top rung, trained")
    View("tokens", "xy").scale(axes)
    axes.set_ylabel("validation loss, nats/token")
    axes.legend(fontsize=8, frameon=False)
    return figure


def mean_over_seeds(seeds: list[dict[str, list[float]]]) -> Curve:
    """Return the mean of the losses that all seeds measured after the same tokens, with its standard error.

    The hours are the mean, too. A single seed has no error.
    """
    shared = functools.reduce(np.intersect1d, [np.array(seed["tokens"]) for seed in seeds])
    kept = [np.isin(seed["tokens"], shared) for seed in seeds]
    seconds, losses = (
        np.array([np.array(seed[key])[rows] for seed, rows in zip(seeds, kept, strict=True)])
        for key in ("seconds", "losses")
    )
    spread = losses.std(axis=0, ddof=1) if len(seeds) > 1 else np.zeros(len(shared))
    x: dict[Axis, np.ndarray] = {"tokens": shared, "hours": seconds.mean(axis=0) / 3600}
    return Curve(x, losses.mean(axis=0), spread / math.sqrt(len(seeds)))


def _write(figure: Figure, path: Path) -> None:
    import matplotlib
    from matplotlib.text import Text

    file = io.BytesIO()
    if path.suffix == ".svg":
        for text in figure.findobj(Text):
            text.set(color=_INK)
        for axes in figure.axes:
            axes.tick_params(color=_INK)
            axes.spines[:].set_color(_INK)
        with matplotlib.rc_context({"svg.hashsalt": "gpt2lab"}):
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        picture = _for_light_and_dark(file.getvalue().decode()).encode()
    else:
        figure.savefig(file, format="png", dpi=130)
        picture = file.getvalue()
    with system_errors_as(ConfigError, path, what="cannot be written"):
        replace_durably(path, picture)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    parsed = not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
    return "another shape" if parsed else "not JSON"


def _for_light_and_dark(svg: str) -> str:
    """Let text and axes of an SVG follow the colour scheme of the reader."""
    style = (
        f"<style>svg{{color:{_INK}}}"
        f"@media(prefers-color-scheme:dark){{svg{{color:{_INK_ON_DARK}}}}}</style>"
    )
    svg = svg.replace(_INK, "currentColor")
    head, end, rest = svg.partition("<defs>")
    svg = f"{head}{style}\n {end}{rest}"
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: pip install matplotlib ({error})") from error
    except OSError as error:  # it wants a folder for its cache
        raise ConfigError(f"plots: {error}") from error
    return Figure(figsize=(width, height), layout="constrained")


def _grid(figure: Figure, panels: int) -> list[Axes]:
    """Return axes in two columns; a last one alone in its row takes both."""
    rows: Any = [[i, min(i + 1, panels - 1)] for i in range(0, panels, 2)]
    return list(figure.subplot_mosaic(rows).values())


def _figure(runs: list[Curves], view: View, *, only_loss: bool = False) -> Figure:
    panels = panels_of(runs)[: 1 if only_loss else None]
    rows = (len(panels) + 1) // 2
    figure = _new_figure(9, 3) if only_loss else _new_figure(12, 3.4 * rows)
    for axes, panel in zip(_grid(figure, len(panels)), panels, strict=True):
        _draw_panel(axes, panel, runs, view)
    return figure


def _draw_panel(axes: Axes, panel: Panel, runs: list[Curves], view: View) -> None:
    for line in panel.lines:
        colour = _GREY if line.colour is None else _COLOURS[line.colour % len(_COLOURS)]
        x, y = line.curve.x[view.x], line.curve.y
        alone: dict[str, Any] = {"marker": "o", "ms": 3} if np.isfinite(y).sum() == 1 else {}
        if line.kind == "points":
            _draw_measured(axes, line.curve, view.x, color=colour, lw=1.5, label=line.name)
        elif line.kind == "raw":
            axes.plot(x, y, color=colour, lw=0.6, alpha=0.3, **alone)
        else:
            style = "--" if line.is_dashed else "-"
            axes.plot(x, y, style, color=colour, lw=1.2, label=line.name, **alone)
    for run, colour in zip(runs, itertools.cycle(_COLOURS), strict=False):
        for resumed in run.resumes[view.x]:
            axes.axvline(resumed, color=colour, lw=0.8, ls=":", alpha=0.7)
    view.scale(axes)
    axes.set_ylabel(panel.title)
    for value, name in panel.references:
        axes.axhline(value, color="#666666", lw=1, ls="--")
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "bottom"}
        axes.annotate(name, (0.01, value), fontsize=8, color="#444444", **place)
    if panel.low is not None and axes.get_yscale() == "linear":
        axes.set_ylim(bottom=panel.low)
    if any(len(run.resumes["step"]) for run in runs):
        axes.set_title("dotted: resumed", fontsize=8, loc="right", color="#666666")
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=8, frameon=False)


def _draw_measured(axes: Axes, curve: Curve, x: Axis, **style: Any) -> None:
    line = "-" if len(curve) >= FEWEST_JOINED else "none"
    axes.errorbar(curve.x[x], curve.y, curve.error, marker="o", ms=3, ls=line, **style)
