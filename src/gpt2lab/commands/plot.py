"""Draw the curves of one run, or of several over each other, into a PNG.

python scripts/plot.py gpt2-124m
python scripts/plot.py gpt2-124m gpt2-mini --out compare.png
"""

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from gpt2lab.config.command_line import option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Plot:
    """Draw the curves of one run, or of several over each other, into a PNG."""

    runs: Positional[tuple[str, ...]] = field(
        metadata={"help": "names in checkpoints/, or folders"}
    )
    out: Path | None = option(None, "PNG to write; default plot.png in the run's folder")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Read the runs, draw them, and say where."""
    flags = run_tyro(Plot, argv)
    from gpt2lab import paths
    from gpt2lab.runs import history, plots

    if not flags.runs:
        raise ConfigError("which run? plot.py RUN [RUN ...]; scripts/status.py lists them")
    runs = paths.from_working_directory(flags.checkpoint_dir) if flags.checkpoint_dir else None
    folders = [history.find_run(name, checkpoint_dir=runs) for name in flags.runs]
    if len(folders) > 1 and flags.out is None:
        raise ConfigError("several runs: say where to write with --out FILE.png")
    out = paths.from_working_directory(flags.out) if flags.out else folders[0] / "plot.png"
    if out.suffix != ".png":
        raise ConfigError(f"--out {out}: a PNG is written; let the name end in .png")
    plots.draw([plots.read_curves(folder) for folder in folders], out)
    print(paths.for_people(out))
    return 0
