"""A run's curves as a picture: losses, HellaSwag, learning rate, throughput. Needs matplotlib, no torch."""

from __future__ import annotations

import io
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab.errors import ConfigError
from gpt2lab.files import replace_durably
from gpt2lab.runs import history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_POINTS = 400  # of a curve: more is noise on a page

# What GPT-2 124M reaches, by the same rule as the curve beside it (reference harness 0.4, acc_norm; the tutorial
# lineage's own protocol), and GPT-3 124M as published, which is another protocol (Brown et al. 2020, table H.1).
REFERENCES = {
    "acc_norm": [(0.3114, "GPT-2 124M"), (0.337, "GPT-3 125M, as published, other protocol")],
    "acc_token_norm": [(0.2955, "GPT-2 124M, tutorial lineage")],
}


@dataclass(frozen=True)
class Curves:
    """What a run recorded, by step; only along the line of steps that its newest weights went through."""

    name: str
    steps: dict[int, dict[str, Any]]
    evals: dict[int, dict[str, Any]]
    hellaswag: dict[int, dict[str, Any]]
    resumes: list[int]


def read_curves(run_dir: Path) -> Curves:
    """Read a run's events.

    Raises: ConfigError if it has taken no step.
    """
    events = history.read_events(run_dir)
    steps = history.current(events, "step")
    if not steps:
        raise ConfigError(f"{run_dir}: has taken no step; nothing to draw")
    return Curves(
        name=run_dir.name,
        steps=steps,
        evals=history.current(events, "eval"),
        hellaswag=history.current(events, "hellaswag"),
        resumes=[event["step"] for event in events if event["event"] == "resume"],
    )


def draw(runs: list[Curves], path: Path) -> None:
    """Draw one or several runs over each other into a PNG.

    Raises: ConfigError if matplotlib is missing or the file cannot be written.
    """
    file = io.BytesIO()
    _figure(runs).savefig(file, format="png", dpi=130)
    try:
        replace_durably(path, file.getvalue())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def draw_svg(runs: list[Curves]) -> bytes:
    """Draw one or several runs over each other as SVG, all text as outlines.

    Raises: ConfigError if matplotlib is missing.
    """
    file = io.BytesIO()
    _figure(runs).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _figure(runs: list[Curves]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: pip install matplotlib ({error})") from error
    metrics = [m for m in REFERENCES if any(_has(run, m) for run in runs)]
    panels = ["loss", *metrics, "lr", "speed"]
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12, 3.4 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    for index, panel in enumerate(panels):
        is_alone = index + 1 == len(panels) and index % 2 == 0
        axes = figure.add_subplot(grid[index // 2, slice(0, 2) if is_alone else index % 2])
        _draw_panel(axes, panel, runs)
        axes.set_xlabel("step")
        axes.set_xlim(0, 1.01 * max(max(run.steps) for run in runs))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _has(run: Curves, metric: str) -> bool:
    return any(event.get(metric) is not None for event in run.hellaswag.values())


def _draw_panel(axes: Axes, panel: str, runs: list[Curves]) -> None:
    several = len(runs) > 1
    for run, colour in zip(runs, _cycle(len(runs)), strict=True):
        label = run.name if several else None
        if panel == "loss":
            x, y = smooth(run.steps, "loss")
            axes.plot(
                x,
                y,
                color=colour,
                alpha=0.6,
                lw=1,
                label=f"{label}, training" if several else "training",
            )
            at = [s for s in sorted(run.evals) if run.evals[s]["val_loss"] is not None]
            errors = [run.evals[s]["val_loss_se"] or 0.0 for s in at]
            axes.errorbar(
                at,
                [run.evals[s]["val_loss"] for s in at],
                errors,
                color=colour,
                marker="o",
                ms=3,
                lw=1.5,
                label=f"{label}, validation" if several else "validation, with its standard error",
            )
        elif panel in REFERENCES:
            at = [s for s in sorted(run.hellaswag) if run.hellaswag[s].get(panel) is not None]
            errors = [run.hellaswag[s].get(f"{panel}_se") or 0.0 for s in at]
            axes.errorbar(
                at,
                [run.hellaswag[s][panel] for s in at],
                errors,
                color=colour,
                marker="o",
                ms=3,
                label=label,
            )
        else:
            x, y = smooth(run.steps, "lr" if panel == "lr" else "tokens_per_second")
            axes.plot(x, y, color=colour, lw=1.2, label=label)
        for step in run.resumes:
            axes.axvline(step, color=colour, lw=0.8, ls=":", alpha=0.7)
    if panel == "loss":
        axes.set_ylabel("loss, nats/token")
    elif panel in REFERENCES:
        axes.set_ylabel(f"HellaSwag {panel}")
        for value, name in REFERENCES[panel]:
            axes.axhline(value, color="#666666", lw=1, ls="--")
            axes.annotate(
                name,
                (0.01, value),
                xycoords=("axes fraction", "data"),
                fontsize=8,
                va="bottom",
                color="#444444",
            )
    else:
        axes.set_ylabel("learning rate" if panel == "lr" else "tokens/s")
        if panel == "speed":
            axes.set_ylim(bottom=0)
    if any(run.resumes for run in runs):
        axes.set_title("dotted: resumed", fontsize=8, loc="right", color="#666666")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def smooth(steps: dict[int, dict[str, Any]], field: str) -> tuple[list[float], list[float]]:
    """Return at most 400 points of a curve: medians of equal stretches of steps, at their middle."""
    known = [step for step in sorted(steps) if steps[step].get(field) is not None]
    width = max(1, -(-len(known) // _POINTS))
    stretches = [known[i : i + width] for i in range(0, len(known), width)]
    x = [statistics.mean(stretch) for stretch in stretches]
    y = [statistics.median(steps[step][field] for step in stretch) for stretch in stretches]
    return x, y
