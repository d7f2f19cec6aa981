"""Write a run's report: one HTML page with everything about it, for any browser, without a network.

gpt2lab report gpt2-124m
gpt2lab report gpt2-124m --out report.html
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from gpt2lab.config.command_line import argument, option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """Write a run's report: one HTML page with everything about it."""

    run: Positional[str] = argument("name in checkpoints/, or folder")
    out: Path | None = option(None, "page to write; default report.html in the run's folder")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Write the page and say where."""
    flags = run_tyro(Report, argv)
    from gpt2lab import paths
    from gpt2lab.runs import history, report

    run_dir = history.find_run(flags.run, checkpoint_dir=flags.checkpoint_dir)
    out = paths.from_working_directory(flags.out) if flags.out else run_dir / "report.html"
    if out.suffix != ".html":
        raise ConfigError(f"--out {out}: a page is written; let the name end in .html")
    report.write_report(run_dir, out)
    print(paths.for_people(out))
    return 0
