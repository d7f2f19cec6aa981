"""The state of every run in a folder, read from the files of the runs while they train. No torch, no locks."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.errors import ConfigError, GPT2LabError, to_gpt2lab_error
from gpt2lab.files import is_count, parse_json, read_regular
from gpt2lab.runs import history
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.folder import BRANCHES, check_entries, holder_of
from gpt2lab.runs.history import Log
from gpt2lab.runs.target import is_run


@dataclass(frozen=True)
class RunStatus:
    """The state of one run; None means not recorded."""

    run_name: str
    state: str  # running | killed | stopped | completed | failed | not begun | unknown
    exit_code: int | None
    step: int | None
    last_step: int | None
    loss: float | None  # nats/token
    val_loss: float | None
    tokens_per_second: float | None
    remaining_seconds: float | None  # from now
    checkpoint_step: int | None
    checkpoint_seconds: float | None  # since it was committed
    heartbeat_seconds: float | None  # since the run last wrote to its metrics
    problem: str | None
    mirror: str | None = None  # the progress of --checkpoint_mirror


def read_runs(
    checkpoint_dir: Path, open_log: Callable[[Path], Log] = history.open_log
) -> list[RunStatus]:
    """Return the status of every run in a folder; the one that wrote to its metrics last comes last."""
    runs = [
        folder
        for folder in catalog.run_folders(checkpoint_dir)
        if (folder / "config.json").is_file() or is_run(folder)
    ]
    return [read_run(run, open_log) for run in sorted(runs, key=_last_write)]


def read_run(run_dir: Path, open_log: Callable[[Path], Log] = history.open_log) -> RunStatus:
    """Return the status of one run; a file that cannot be read becomes its `problem`."""
    now, problem, newest, log = time.time(), None, None, Log(b"")
    try:
        log = open_log(run_dir)
        newest, problem = log.last_step(), log.problem
    except (GPT2LabError, OSError) as error:
        problem = str(to_gpt2lab_error(error) or error)
    try:
        check_entries(run_dir)
    except ConfigError as error:
        problem = problem or str(error)
    status = history.read_json(run_dir / "status.json") or {}
    if not status and log and problem is None:
        problem = "status.json is missing or damaged; the next start writes it again"
    if not (run_dir / "config.json").is_file():
        problem = problem or "config.json is missing; a resume writes it again"
    evals, begin, newest = log.evals_of_data(), log.last_begin, newest or {}
    infos, damaged = catalog.list_checkpoints(run_dir)
    if damaged and problem is None:
        problem = f"damaged checkpoint: {damaged[-1]}"
    state = status.get("state", "unknown" if log else "not begun")
    is_locked = holder_of(run_dir) is not None
    if state == "unknown" and is_locked:
        state = "running"
    if state == "running" and not is_locked:
        state = "killed"
    remaining = newest.get("remaining_seconds")
    if newest.get("attempt") != log.last_attempt:  # as of before a pause
        remaining = None
    if state == "running" and remaining is not None:
        remaining = max(0.0, remaining - (now - newest["time"]))
    return RunStatus(
        run_name=run_dir.name,
        state=state,
        exit_code=status.get("exit_code"),
        step=newest.get("step"),
        last_step=begin["max_steps"] if begin else None,
        loss=newest.get("loss"),
        val_loss=evals[-1]["val_loss"] if evals else None,
        tokens_per_second=newest.get("tokens_per_second"),
        remaining_seconds=remaining,
        checkpoint_step=infos[-1].step if infos else None,
        checkpoint_seconds=max(0.0, now - infos[-1].created) if infos else None,
        heartbeat_seconds=max(0.0, now - _last_write(run_dir)) if log else None,
        problem=problem,
        mirror=describe_mirror(status),
    )


def lineage(checkpoint_dir: Path, *, of: str | None = None) -> list[str]:
    """Draw the runs of a folder that begin as branches as trees, or only the tree of a run; [] without a branch."""
    runs = [run.name for run in catalog.run_folders(checkpoint_dir)]
    origins: dict[str, tuple[str, int]] = {}
    for name in runs:
        branch = (history.read_json(checkpoint_dir / name / "run.json") or {}).get("branch_from")
        if isinstance(branch, dict) and is_count(branch.get("step")):
            origins[name] = str(branch.get("run")), branch["step"]
        for folder, step in _branches_elsewhere(checkpoint_dir / name):
            origins[folder] = name, step

    def draw(name: str, indent: str) -> Iterator[str]:
        below = sorted((step, run) for run, (of, step) in origins.items() if of == name)
        for number, (step, run) in enumerate(below, start=1):
            is_last = number == len(below)
            yield f"{indent}{'└── ' if is_last else '├── '}{run} @{step}"
            yield from draw(run, indent + ("    " if is_last else "│   "))

    root = of
    for _ in origins:  # at most: records that were edited may go round
        root = origins[root][0] if root in origins else root
    roots = {begin for begin, _ in origins.values()} - origins.keys()
    return [
        line
        for name in sorted(roots if root is None else roots & {root})
        for line in (name if name in runs else f"{name} (not here)", *draw(name, ""))
    ]


def _branches_elsewhere(run_dir: Path) -> Iterator[tuple[str, int]]:
    """Yield the branches that a run has in other folders, and their steps; those that were deleted are left out."""
    with suppress(OSError):
        for line in read_regular(run_dir / BRANCHES, at_most=1 << 20).splitlines():
            with suppress(ValueError, KeyError, TypeError):
                found = parse_json(line)
                folder, step = Path(found["folder"]), found["step"]
                is_here = folder.resolve().parent == run_dir.resolve().parent
                if is_count(step) and not is_here and folder.is_dir():
                    yield paths.display_path(folder), step


def describe_mirror(status: dict[str, Any]) -> str | None:
    """Write what a status.json says of --checkpoint_mirror; None without one."""
    found = status.get("mirror")
    if not isinstance(found, dict):
        return None
    step, newest, error = (found.get(key) for key in ("step", "newest", "error"))
    line = f"mirror: newest copy is step {step}" if is_count(step) else "mirror: no copy yet"
    line += f", newest checkpoint is step {newest}" if is_count(newest) else ""
    return f"{line:.100}" + (f"; last error {error:.200}" if isinstance(error, str) else "")


# The columns of the table, and the order in which they are left out if it is too wide.
_COLUMNS = ("run", "state", "step", "loss", "val loss", "tok/s", "eta", "saved", "last write")
_LEFT_OUT = ("last write", "tok/s", "loss", "saved", "eta", "val loss")


def status_table(runs: list[RunStatus], *, width: int | None = None) -> str:
    """Write the runs as a table of at most `width` characters, with a line below for each problem."""
    rows = [_cells(run) for run in runs]
    columns = list(_COLUMNS)
    for name in ("", *_LEFT_OUT):
        columns = [column for column in columns if column != name]
        table = fmt.table(columns, [[row[column] for column in columns] for row in rows])
        if width is None or max(map(len, table.splitlines())) <= width:
            break
    lines = [
        f"{run.run_name}: {line}" for run in runs for line in (run.problem, run.mirror) if line
    ]
    return "\n".join([table, *lines])


def _cells(run: RunStatus) -> dict[str, str]:
    ago = (run.checkpoint_seconds, run.heartbeat_seconds)
    saved, written = ("-" if age is None else f"{fmt.duration(age)} ago" for age in ago)
    return {
        "run": run.run_name,
        "state": run.state if not run.exit_code else f"{run.state} ({run.exit_code})",
        "step": "n/a" if run.step is None else f"{run.step:,}/{fmt.number(run.last_step, ',d')}",
        "loss": fmt.number(run.loss),
        "val loss": fmt.number(run.val_loss),
        "tok/s": fmt.number(run.tokens_per_second, ",.0f"),
        "eta": fmt.duration(run.remaining_seconds) if run.state == "running" else "-",
        "saved": saved if run.checkpoint_step is None else f"{run.checkpoint_step:,}, {saved}",
        "last write": written,
    }


def _last_write(run_dir: Path) -> float:
    try:
        return (run_dir / METRICS).stat().st_mtime
    except OSError:
        return 0.0
