"""Show all runs: state, step, loss, speed, time left, last checkpoint.

gpt2lab status
gpt2lab status latest
gpt2lab status --watch 5
"""

import contextlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt2lab import paths
from gpt2lab.commands.parser import AmongRuns, WithJson, parse_flags
from gpt2lab.config.flags import RUN, argument, option
from gpt2lab.errors import ConfigError
from gpt2lab.runs.console import doing

_DAY = 86_400.0  # seconds


@dataclass(frozen=True)
class Status(WithJson, AmongRuns):
    """Show all runs: state, step, loss, speed, time left, last checkpoint."""

    run: str | None = argument(f"{RUN}; default all", default=None)
    watch: float | None = option(None, "show again every so many seconds, until Ctrl+C")


def main(argv: list[str]) -> int:
    """Print the table once, or again and again."""
    flags = parse_flags(Status, argv)
    from gpt2lab.runs import history, overview
    from gpt2lab.runs.events import METRICS
    from gpt2lab.runs.target import find_run

    if flags.watch is not None and (flags.json or not 0 < flags.watch <= _DAY):
        raise ConfigError(
            f"--watch {flags.watch} takes seconds above 0, at most a day, and does not go with --json"
        )
    folder = flags.runs_folder()
    run = find_run(flags.run, flags.checkpoint_dir) if flags.run else None
    logs: dict[Path, tuple[object, history.Log]] = {}

    def open_log(run_dir: Path) -> history.Log:
        """Return a run's log: that of the last refresh while its file is as it was."""
        try:
            found = os.stat(run_dir / METRICS)
        except OSError:
            return history.open_log(run_dir)
        state = found.st_size, found.st_mtime_ns
        if run_dir not in logs or logs[run_dir][0] != state:
            logs[run_dir] = state, history.open_log(run_dir)
        return logs[run_dir][1]

    def shown() -> str:
        runs = [overview.read_run(run, open_log)] if run else overview.read_runs(folder, open_log)
        if flags.json:
            return json.dumps({"runs": [asdict(run) for run in runs]})
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        if not runs:
            return f"no runs in {paths.display_path(folder)}"
        return overview.status_table(runs, width=width)

    if flags.watch is None:
        print(shown())
        return 0
    with doing(""), contextlib.suppress(KeyboardInterrupt):  # the way to end it
        while True:
            text = f"{time.strftime('%H:%M:%S')}\n{shown()}"
            sys.stdout.buffer.write(b"\x1b[H\x1b[2J")  # print would escape it
            print(text, flush=True)
            time.sleep(flags.watch)
    return 0
