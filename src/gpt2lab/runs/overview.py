"""All runs of a folder at a glance, read from their files while they train. No torch, nothing is locked."""

from __future__ import annotations

import dataclasses
import fcntl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.mirror import describe_status
from gpt2lab.errors import GPT2LabError
from gpt2lab.runs import history
from gpt2lab.runs.history import Log


@dataclass(frozen=True)
class RunStatus:
    """The state of one run; None means not recorded."""

    run_name: str
    state: str  # running | killed | stopped | completed | failed | not begun
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
    mirror: str | None = None  # how far --checkpoint_mirror is


def read_runs(checkpoint_dir: Path) -> list[RunStatus]:
    """Return the status of every run in a folder, the one that wrote last at the end."""
    folders = catalog.run_folders(checkpoint_dir)
    runs = [path for path in folders if (path / "config.json").is_file()]
    return [read_run(run) for run in sorted(runs, key=_last_write)]


def read_run(run_dir: Path, log: Log | None = None) -> RunStatus:
    """Return the status of one run, by its log if that is read; an unreadable file is its `problem`, no error."""
    now, problem, newest = time.time(), None, None
    try:
        log = log or history.open_log(run_dir)
        newest, problem = log.last_step(), log.problem
    except (GPT2LabError, OSError) as error:
        log, problem = log or Log(run_dir, []), str(error)
    status = history.read_json(run_dir / "status.json") or {}
    evals, begun, newest = log.current("eval"), log.of_kind("begin"), newest or {}
    infos, damaged = catalog.list_checkpoints(run_dir)
    if damaged and problem is None:
        problem = f"damaged checkpoint: {damaged[-1]}"
    state = status.get("state", "not begun")
    if state == "running" and not _is_locked(run_dir):
        state = "killed"
    remaining = newest.get("remaining_seconds")
    if state == "running" and remaining is not None:
        remaining = max(0.0, remaining - (now - newest["time"]))
    return RunStatus(
        run_name=run_dir.name,
        state=state,
        exit_code=status.get("exit_code"),
        step=newest.get("step"),
        last_step=begun[-1]["max_steps"] if begun else None,
        loss=newest.get("loss"),
        val_loss=evals[max(evals)]["val_loss"] if evals else None,
        tokens_per_second=newest.get("tokens_per_second"),
        remaining_seconds=remaining,
        checkpoint_step=infos[-1].step if infos else None,
        checkpoint_seconds=max(0.0, now - infos[-1].created) if infos else None,
        heartbeat_seconds=max(0.0, now - _last_write(run_dir)) if log else None,
        problem=problem,
        mirror=describe_status(status),
    )


def describe(runs: list[RunStatus]) -> str:
    """Write the runs as a table, with a line below for each problem."""
    header = ("run", "state", "step", "loss", "val loss", "tok/s", "eta", "saved", "last write")
    rows = [
        (
            run.run_name,
            run.state if not run.exit_code else f"{run.state} ({run.exit_code})",
            "n/a" if run.step is None else f"{run.step:,}/{run.last_step:,}",
            fmt.number(run.loss),
            fmt.number(run.val_loss),
            fmt.number(run.tokens_per_second, ",.0f"),
            fmt.duration(run.remaining_seconds) if run.state == "running" else "-",
            "-"
            if run.checkpoint_seconds is None
            else f"{run.checkpoint_step:,}, {fmt.duration(run.checkpoint_seconds)} ago",
            "-" if run.heartbeat_seconds is None else f"{fmt.duration(run.heartbeat_seconds)} ago",
        )
        for run in runs
    ]
    lines = [
        f"{run.run_name}: {line}" for run in runs for line in (run.problem, run.mirror) if line
    ]
    return "\n".join([fmt.table(header, rows), *lines])


def as_json(runs: list[RunStatus]) -> dict[str, Any]:
    """Return the runs as one object."""
    return {"runs": [dataclasses.asdict(run) for run in runs]}


def _last_write(run_dir: Path) -> float:
    try:
        return (run_dir / catalog.METRICS).stat().st_mtime
    except OSError:
        return 0.0


def _is_locked(run_dir: Path) -> bool:
    """Tell whether a process trains in the folder, by its lock."""
    try:
        with open(run_dir / "run.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
