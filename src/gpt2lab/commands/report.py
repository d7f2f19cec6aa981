"""Write a report: one HTML page with everything about a run, or about several, for any browser, without a network.

gpt2lab report latest
gpt2lab report latest --out report.html
gpt2lab report latest gpt2-mini --out compare.html
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2lab import paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """Write a report: one HTML page with everything about a run, or about several with their curves together."""

    runs: tuple[str, ...] = argument("names in checkpoints/, or folders")
    out: Path | None = option(
        None, "page to write; default, of a single run, report.html in its folder"
    )
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Write the page and say where."""
    flags = parse_flags(Report, argv)
    from gpt2lab.report import page as report
    from gpt2lab.runs.target import find_run

    if not flags.runs:
        raise ConfigError("which run? gpt2lab report RUN [RUN ...]; gpt2lab status lists them")
    folders = [find_run(run, flags.checkpoint_dir) for run in flags.runs]
    if len(folders) > 1 and flags.out is None:
        raise ConfigError("several runs: say where to write with --out FILE.html")
    out = paths.from_working_directory(flags.out) if flags.out else folders[0] / "report.html"
    if out.suffix != ".html":
        raise ConfigError(f"--out {out}: a page is written; let the name end in .html")
    report.write_report(folders, out)
    print(paths.display_path(out))
    return 0
