"""Find the run and the checkpoint that `--resume` means. No torch.

With `set_aside`, damaged checkpoints are renamed.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config
from gpt2lab.errors import CheckpointError, ConfigError, InUseError
from gpt2lab.runs.folder import holder_of
from gpt2lab.runs.history import deleted_newest
from gpt2lab.runs.target import closest_run

_NEWEST = ("latest", "auto", "best")  # words of --resume


@dataclass(frozen=True)
class Place:
    """The run and the checkpoint that a start continues from."""

    run_dir: Path | None  # None: a fresh run, whose folder follows from its settings
    checkpoint: CheckpointInfo | None  # None: a fresh run
    warnings: tuple[str, ...] = ()
    branch: dict[str, Any] | None = None  # of a new branch: whose checkpoint it is


def locate(request: RunRequest, *, set_aside: bool) -> Place:
    """Return the run and the checkpoint of a request.

    Raises: ConfigError, CheckpointError, InUseError if there is none, or the request is ambiguous.
    """
    target = request.resume
    if target == "auto" and request.config.checkpoint.run_name is None:
        raise ConfigError(
            "--resume auto needs --run_name: without it, which run to continue would be a guess"
        )
    if request.branch_from is not None:
        return _begin_branch(request, request.branch_from)
    if target is None:
        return Place(None, None)
    is_step = re.fullmatch(r"[0-9]+", target) is not None
    if target not in _NEWEST and not is_step:
        return _locate_path(request, target)
    run_dir = _run_of(request)
    if target == "best" or is_step:
        return Place(run_dir, catalog.find(run_dir, target))
    return _newest_of(run_dir, must_exist=target == "latest", set_aside=set_aside)


def _begin_branch(request: RunRequest, folder: Path) -> Place:
    """Return another run's checkpoint, and the new run's folder; nothing is renamed in the other run's folder."""
    found = catalog.open_checkpoint(folder)
    run_dir = fresh_folder(replace(request.config, model=found.config().model))
    record = {"run": folder.parent.name, "step": found.step, "folder": str(folder)}
    record["manifest_sha256"] = found.manifest["manifest_sha256"]
    return Place(run_dir, found, branch=record)


def _locate_path(request: RunRequest, target: str) -> Place:
    path = paths.from_working_directory(Path(target))
    hint = fmt.did_you_mean(target, _NEWEST, flag="--resume ")
    if hint and not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder; {hint}")
    checkpoint = catalog.open_checkpoint(path)
    run_dir = checkpoint.path.parent
    in_place = checkpoint.path.name == folder_name(checkpoint.step)
    if not in_place or run_dir.name.startswith(catalog.SUPERSEDED):
        raise CheckpointError(
            f"{checkpoint.path}: not in its run's folder under its own name; "
            f"move it to RUN/{folder_name(checkpoint.step)} first"
        )
    asked = request.config.checkpoint
    for flag, chosen, here in (
        ("run_name", asked.run_name, run_dir.name),
        ("checkpoint_dir", asked.checkpoint_dir.resolve(), run_dir.parent.resolve()),
    ):
        if flag in request.chosen and chosen != here:
            raise ConfigError(
                f"--{flag} names another run than --resume {target}; leave one of them out"
            )
    return Place(run_dir, checkpoint)


def _run_of(request: RunRequest) -> Path:
    """Return the folder of the run that is named, else of the one whose checkpoint was committed last."""
    folder, name = request.config.checkpoint.checkpoint_dir, request.config.checkpoint.run_name
    run_dir = folder / name if name else catalog.newest_run(folder)
    if run_dir is None:
        raise CheckpointError(
            f"{folder}: no checkpoint of any run to resume; start one without --resume"
        )
    if request.resume != "auto" and not run_dir.is_dir():
        similar = closest_run(run_dir.name, [run.name for run in catalog.run_folders(folder)])
        if similar is not None:
            raise CheckpointError(f"{run_dir}: no such run; did you mean --run_name {similar}?")
    return run_dir


def _newest_of(run_dir: Path, *, must_exist: bool, set_aside: bool) -> Place:
    existed = catalog.has_checkpoints(run_dir)
    info, warnings = catalog.newest_valid(run_dir, set_aside=set_aside)
    warnings += deleted_newest(run_dir, info)
    if info is None and existed:
        raise CheckpointError(f"{run_dir}: every checkpoint is damaged: {warnings[0]}")
    if info is None and (holder := holder_of(run_dir)) is not None:
        raise InUseError(
            f"{run_dir}: in use by {holder}, which has not saved a checkpoint yet; wait for it, or stop it"
        )
    if info is None and must_exist:
        raise CheckpointError(
            f"{run_dir}: no checkpoint to resume; start the run without --resume, or use --resume auto"
        )
    return Place(run_dir, info, tuple(warnings))


def fresh_folder(config: Config) -> Path:
    """Return the folder of a fresh run: its name, else the model and the time.

    Raises: ConfigError if it holds checkpoints already.
    """
    name = config.checkpoint.run_name or f"{config.model.model}_{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = config.checkpoint.checkpoint_dir / name
    place = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not place.is_dir():
        raise ConfigError(f"{place}: a file; choose another --checkpoint_dir or --run_name")
    if catalog.has_checkpoints(run_dir):
        raise ConfigError(
            f"{run_dir} holds checkpoints already; continue it with --run_name {name} --resume latest, "
            f"or start another with --run_name {name}_2"
        )
    return run_dir
