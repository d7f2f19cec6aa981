"""Show runs as pictures or as a page.

gpt2lab plot latest
gpt2lab plot latest gpt2-mini --x tokens --log xy --out compare.png
gpt2lab plot --ablation checkpoints/ablation
gpt2lab plot --ladder checkpoints/ladder
gpt2lab report latest
gpt2lab report latest --out report.html
gpt2lab report latest gpt2-mini --out compare.html
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from gpt2lab import paths
from gpt2lab.commands.parser import AmongRuns, parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import ConfigError

# Flags that draw something else than runs, and those that count beside them and --out.
_INSTEAD = {"ablation": ("x", "log"), "ladder": (), "compare": (), "speeds": ()}


@dataclass(frozen=True)
class Plot(AmongRuns):
    """Draw the curves of one run, of several over each other, or of an ablation, into a PNG or an SVG."""

    runs: tuple[str, ...] = argument("names in checkpoints/, or folders")
    out: Path | None = option(
        None, "PNG, or SVG for light and dark pages, to write; default plot.png in the run's folder"
    )
    x: Literal["step", "tokens", "hours"] | None = option(
        None,
        "what the curves run over; hours are those spent in steps; default step, tokens with --ablation",
    )
    log: Literal["x", "y", "xy"] | None = option(None, "axes with a logarithmic scale")
    only_loss: bool = option(False, "draw the loss alone")
    ablation: Path | None = option(
        None,
        "folder of an ablation: draw the validation loss of each of its settings, mean and standard "
        "error over its seeds, and the differences with their intervals, instead of runs; default ablation.png there",
    )
    ladder: Path | None = option(
        None,
        "folder of a ladder: draw its rungs, the law fitted to them and its prediction, instead of runs; default "
        "ladder.png there",
    )
    compare: Path | None = option(
        None,
        "file with the output of `compare --json`, of groups of runs or of two runs with --explain: draw the "
        "differences or the parts of the difference with their intervals, instead of runs; default the same name "
        "with .png",
    )
    speeds: Path | None = option(
        None, "draw measured tokens/s from this JSON file (docs/benchmarks.json) instead of runs"
    )


def main(argv: list[str]) -> int:
    """Read the runs, draw them, and say where."""
    flags = parse_flags(Plot, argv, name="gpt2lab plot")
    leaves = [leaf.name for leaf in fields(flags)]
    given = [name for name in leaves if getattr(flags, name) not in (None, (), False)]
    for subject in (name for name in _INSTEAD if name in given):
        if idle := set(given) - {subject, "out", *_INSTEAD[subject]}:
            names = " and ".join(n if n == "runs" else f"--{n}" for n in given if n in idle)
            raise ConfigError(f"--{subject} draws one picture of its own; leave out {names}")
    from gpt2lab.report import curves, plots

    out = paths.from_working_directory(flags.out) if flags.out else None
    if out and out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out {out}: let the name end in .png or .svg")
    tables: dict[plots.Table, Path | None] = {
        "speeds": flags.speeds,
        "compare": flags.compare,
        "ladder": flags.ladder and flags.ladder / "ladder.json",
        "ablation": flags.ablation and flags.ablation / "ablation.json",
    }
    for kind, typed in tables.items():
        if typed is not None:
            if kind == "speeds" and out is None:
                raise ConfigError("--speeds: say where to write with --out FILE.png")
            if kind == "ablation" and flags.x == "step":
                raise ConfigError(
                    "--ablation: settings may differ in their steps; --x tokens or hours"
                )
            file = paths.from_working_directory(typed)
            out = out or file.with_suffix(".png")
            plots.draw_table(kind, file, out, plots.View(flags.x or "tokens", flags.log))
            break
    else:
        folders, out = _find(flags, "plot", "plot.png")
        view = plots.View(flags.x or "step", flags.log)
        drawn = [curves.read_curves(run) for run in folders]
        plots.draw(drawn, out, view, only_loss=flags.only_loss)
    print(paths.display_path(out))
    return 0


def _find(flags: "Plot | Report", verb: str, default: str) -> tuple[list[Path], Path]:
    """Return the folders of the runs, and the file to write: --out, else `default` in the folder of a single run."""
    from gpt2lab.runs.target import find_run

    if not flags.runs:
        raise ConfigError(f"which run? gpt2lab {verb} RUN [RUN ...]; gpt2lab status lists them")
    folders = [find_run(name, flags.checkpoint_dir) for name in flags.runs]
    if len(folders) > 1 and flags.out is None:
        ending = default.rpartition(".")[2]
        raise ConfigError(f"several runs: say where to write with --out FILE.{ending}")
    return folders, paths.from_working_directory(flags.out or folders[0] / default)


@dataclass(frozen=True)
class Report(AmongRuns):
    """Write a report: one HTML page with everything about a run, or about several, for any browser, without a network.

    Several runs are shown with their curves together.
    """

    runs: tuple[str, ...] = argument("names in checkpoints/, or folders")
    out: Path | None = option(
        None, "page to write; default, of a single run, report.html in its folder"
    )


def report(argv: list[str]) -> int:
    """Write the page and say where."""
    flags = parse_flags(Report, argv, name="gpt2lab report")
    from gpt2lab.report.page import write_report

    folders, out = _find(flags, "report", "report.html")
    if out.suffix != ".html":
        raise ConfigError(f"--out {out}: a page is written; let the name end in .html")
    write_report(folders, out)
    print(paths.display_path(out))
    return 0
