"""Pictures of a run's curves and of measured speeds. Needs matplotlib, no torch."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2lab.errors import ConfigError
from gpt2lab.files import replace_durably
from gpt2lab.runs import history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_POINTS = 400  # of a curve: more is noise on a page
# Text and lines of an SVG that is read on a light and on a dark page.
_INK, _INK_ON_DARK = "#656d76", "#9198a1"
_GREY = "#8c959f"

# What GPT-2 124M reaches, by the same rule as the curve beside it (reference harness 0.4, acc_norm; the tutorial
# lineage's own protocol), and GPT-3 124M as published, which is another protocol (Brown et al. 2020, table H.1).
REFERENCES = {
    "acc_norm": [(0.3114, "GPT-2 124M"), (0.337, "GPT-3 125M, as published, other protocol")],
    "acc_token_norm": [(0.2955, "GPT-2 124M, tutorial lineage")],
}


Curve = tuple[list[float], list[float]]  # steps, values


@dataclass(frozen=True)
class Curves:
    """What a run recorded; only along the line of steps that its newest weights went through."""

    name: str
    last_step: int
    loss: Curve
    lr: Curve
    tokens_per_second: Curve
    evals: dict[int, dict[str, Any]]
    hellaswag: dict[int, dict[str, Any]]
    resumes: list[int]


def read_curves(run_dir: Path) -> Curves:
    """Read a run's events.

    Raises: ConfigError if it has taken no step.
    """
    return curves_of(run_dir, history.read_log(run_dir))


def curves_of(run_dir: Path, log: history.Log) -> Curves:
    """Take what is drawn from a run's log.

    Raises: ConfigError if it has taken no step.
    """
    if not len(log.numbers):
        raise ConfigError(f"{run_dir}: has taken no step; nothing to draw")
    return Curves(
        name=run_dir.name,
        last_step=int(log.numbers[-1]),
        loss=smooth(log.numbers, log.column("loss")),
        lr=smooth(log.numbers, log.column("lr")),
        tokens_per_second=smooth(log.numbers, log.column("tokens_per_second")),
        evals=log.current("eval"),
        hellaswag=log.current("hellaswag"),
        resumes=[event["step"] for event in log.of_kind("resume")],
    )


def draw(runs: list[Curves], path: Path, *, only_loss: bool = False) -> None:
    """Draw one or several runs over each other into a PNG, or an SVG for light and dark pages.

    Raises: ConfigError if matplotlib is missing or the file cannot be written.
    """
    _write(_figure(runs, only_loss=only_loss), path)


def draw_speeds(table: Path, path: Path) -> None:
    """Draw measured tokens/s as bars, a panel per model size; `table` is JSON like docs/benchmarks.json.

    Raises: ConfigError if matplotlib is missing, the table cannot be read or the file cannot be written.
    """
    try:
        sizes = json.loads(table.read_text())["tokens_per_second"]
        panels = [(name, list(speeds.items())) for name, speeds in sizes.items()]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{table}: no table of speeds ({error!r})") from error
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
    _write(figure, path)


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
    try:
        replace_durably(path, picture)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def _for_light_and_dark(svg: str) -> str:
    """Let the reader's colour scheme decide how text and lines of an SVG look."""
    style = (
        f"<style>svg{{color:{_INK}}}"
        f"@media(prefers-color-scheme:dark){{svg{{color:{_INK_ON_DARK}}}}}</style>"
    )
    svg = svg.replace(_INK, "currentColor")
    head, end, rest = svg.partition("<defs>")
    svg = f"{head}{style}\n {end}{rest}"
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def draw_svg(runs: list[Curves]) -> bytes:
    """Draw one or several runs over each other as SVG, all text as outlines.

    Raises: ConfigError if matplotlib is missing.
    """
    file = io.BytesIO()
    _figure(runs).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: pip install matplotlib ({error})") from error
    return Figure(figsize=(width, height), layout="constrained")


def _grid(figure: Figure, panels: int) -> list[Axes]:
    """Return axes in two columns; a last one without a neighbour takes both."""
    grid = figure.add_gridspec((panels + 1) // 2, min(2, panels))
    return [
        figure.add_subplot(
            grid[i // 2, :] if i + 1 == panels and i % 2 == 0 else grid[i // 2, i % 2]
        )
        for i in range(panels)
    ]


def _figure(runs: list[Curves], *, only_loss: bool = False) -> Figure:
    scores = [event for run in runs for event in run.hellaswag.values()]
    metrics = [m for m in REFERENCES if any(event.get(m) is not None for event in scores)]
    panels = ["loss"] if only_loss else ["loss", *metrics, "lr", "speed"]
    rows = (len(panels) + 1) // 2
    figure = _new_figure(9, 3) if only_loss else _new_figure(12, 3.4 * rows)
    for axes, panel in zip(_grid(figure, len(panels)), panels, strict=True):
        _draw_panel(axes, panel, runs)
        axes.set_xlabel("step")
        axes.set_xlim(0, 1.01 * max(run.last_step for run in runs))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_panel(axes: Axes, panel: str, runs: list[Curves]) -> None:
    several = len(runs) > 1
    for run, colour in zip(runs, itertools.cycle(_COLOURS), strict=False):
        label = run.name if several else None
        if panel == "loss":
            x, y = run.loss
            training: dict[str, Any] = (
                {"color": colour, "alpha": 0.6} if several else {"color": _GREY}
            )
            name = f"{run.name}, training" if several else "training"
            axes.plot(x, y, lw=1, label=name, **training)
            name = f"{run.name}, validation" if several else "validation, with its standard error"
            _draw_measured(axes, run.evals, "val_loss", color=colour, lw=1.5, label=name)
        elif panel in REFERENCES:
            _draw_measured(axes, run.hellaswag, panel, color=colour, label=label)
        else:
            x, y = run.lr if panel == "lr" else run.tokens_per_second
            axes.plot(x, y, color=colour, lw=1.2, label=label)
        for step in run.resumes:
            axes.axvline(step, color=colour, lw=0.8, ls=":", alpha=0.7)
    if panel == "loss":
        axes.set_ylabel("loss, nats/token")
    elif panel in REFERENCES:
        axes.set_ylabel(f"HellaSwag {panel}")
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "bottom"}
        for value, name in REFERENCES[panel]:
            axes.axhline(value, color="#666666", lw=1, ls="--")
            axes.annotate(name, (0.01, value), fontsize=8, color="#444444", **place)
    else:
        axes.set_ylabel("learning rate" if panel == "lr" else "tokens/s")
        if panel == "speed":
            axes.set_ylim(bottom=0)
    if any(run.resumes for run in runs):
        axes.set_title("dotted: resumed", fontsize=8, loc="right", color="#666666")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _draw_measured(
    axes: Axes, events: dict[int, dict[str, Any]], metric: str, **style: Any
) -> None:
    """Draw the evaluations that have a metric, at most 400 of them, with its standard errors."""
    steps = [step for step in sorted(events) if events[step].get(metric) is not None]
    known = {step: events[step] for step in spread(steps, _POINTS)}
    values = [event[metric] for event in known.values()]
    errors = [event.get(f"{metric}_se") or 0.0 for event in known.values()]
    line = "-" if len(known) >= 5 else "none"  # a line between few points misleads
    axes.errorbar(list(known), values, errors, marker="o", ms=3, ls=line, **style)


def spread(steps: list[int], count: int) -> list[int]:
    """Return at most `count` of the steps, the first and the last among them."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def smooth(steps: np.ndarray, values: np.ndarray) -> Curve:
    """Return at most 400 points of a curve: medians of equal stretches of steps, at their middle."""
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    width = max(1, -(-len(steps) // _POINTS))
    begins = range(0, len(steps), width)
    x = [float(np.mean(steps[i : i + width])) for i in begins]
    y = [float(np.median(values[i : i + width])) for i in begins]
    return x, y
