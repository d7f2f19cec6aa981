"""Draw the curves of one run, or of several over each other, into a PNG or an SVG.

gpt2lab plot gpt2-124m
gpt2lab plot gpt2-124m gpt2-mini --out compare.png
gpt2lab plot gpt2-124m --only_loss --out docs/images/loss.svg
gpt2lab plot --speeds docs/benchmarks.json --out docs/images/tokens_per_second.svg
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from gpt2lab.config.command_line import argument, option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Plot:
    """Draw the curves of one run, or of several over each other, into a PNG or an SVG."""

    runs: Positional[tuple[str, ...]] = argument("names in checkpoints/, or folders")
    out: Path | None = option(
        None,
        "PNG, or SVG for light and dark pages, to write; default plot.png in the run's folder",
    )
    only_loss: bool = option(False, "draw the loss alone")
    speeds: Path | None = option(
        None, "draw measured tokens/s from this JSON file (docs/benchmarks.json) instead of runs"
    )
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Read the runs, draw them, and say where."""
    flags = run_tyro(Plot, argv)
    from gpt2lab import paths
    from gpt2lab.runs import history, plots

    out = paths.from_working_directory(flags.out) if flags.out else None
    if out and out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out {out}: let the name end in .png or .svg")
    if flags.speeds is not None:
        if flags.runs or out is None:
            raise ConfigError("--speeds needs --out FILE and takes no run")
        plots.draw_speeds(paths.from_working_directory(flags.speeds), out)
        print(paths.for_people(out))
        return 0
    if not flags.runs:
        raise ConfigError("which run? plot.py RUN [RUN ...]; scripts/status.py lists them")
    folders = [history.find_run(name, checkpoint_dir=flags.checkpoint_dir) for name in flags.runs]
    if len(folders) > 1 and out is None:
        raise ConfigError("several runs: say where to write with --out FILE.png")
    out = out or folders[0] / "plot.png"
    plots.draw([plots.read_curves(folder) for folder in folders], out, only_loss=flags.only_loss)
    print(paths.for_people(out))
    return 0
