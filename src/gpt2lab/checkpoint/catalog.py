"""The checkpoints of a run: list, choose, label, retire. Reads manifests only; no torch."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.checkpoint import manifest as manifests
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.errors import CheckpointError
from gpt2lab.files import replace_durably

LABELS = "labels"
SUPERSEDED = "superseded-"


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, as its manifest tells it."""

    path: Path
    step: int
    kind: str
    tokens: int
    val_loss: float | None
    created: float
    num_bytes: int
    labels: tuple[str, ...]
    manifest: dict[str, Any]


def _step_folders(run_dir: Path) -> list[Path]:
    """Return the folders named like checkpoints, oldest first; anything else in the run is not ours to judge."""
    try:
        entries = list(os.scandir(run_dir))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(
        Path(entry.path)
        for entry in entries
        if entry.name.startswith("step_")
        and entry.name[5:].isdigit()
        and entry.is_dir(follow_symlinks=False)
    )


def list_checkpoints(run_dir: Path) -> tuple[list[CheckpointInfo], list[CheckpointError]]:
    """Return the run's checkpoints, oldest first, and what is wrong with folders whose manifest does not hold."""
    labels = read_labels(run_dir)
    infos, damaged = [], []
    for folder in _step_folders(run_dir):
        try:
            manifest = manifests.read_manifest(folder)
            infos.append(_describe(folder, manifest, labels))
        except CheckpointError as error:
            damaged.append(error)
    return sorted(infos, key=lambda info: info.step), damaged


def _describe(folder: Path, manifest: dict[str, Any], labels: dict[str, str]) -> CheckpointInfo:
    return CheckpointInfo(
        path=folder,
        step=manifest["step"],
        kind=manifest["kind"],
        tokens=manifest["tokens"],
        val_loss=manifest.get("val_loss"),
        created=manifest["created"],
        num_bytes=sum(file["bytes"] for file in manifest["files"].values()),
        labels=tuple(sorted(name for name, target in labels.items() if target == folder.name)),
        manifest=manifest,
    )


def has_checkpoints(run_dir: Path) -> bool:
    """Tell whether a folder holds anything named like a checkpoint, readable or not."""
    return bool(_step_folders(run_dir))


def read_labels(run_dir: Path) -> dict[str, str]:
    """Return {label: folder name}, e.g. {'best': 'step_00000250'}."""
    folder = run_dir / LABELS
    if not folder.is_dir():
        return {}
    return {
        path.name: path.read_text(errors="replace").strip()
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }


def set_label(run_dir: Path, label: str, step: int) -> None:
    """Point a label at a step; a new `best` moves the old one to `best_prev`."""
    (run_dir / LABELS).mkdir(exist_ok=True)
    target = manifests.folder_name(step)
    previous = read_labels(run_dir).get(label)
    if label == "best" and previous not in (None, target):
        replace_durably(run_dir / LABELS / "best_prev", f"{previous}\n")
    replace_durably(run_dir / LABELS / label, f"{target}\n")


def run_folders(checkpoint_dir: Path) -> list[Path]:
    """Return the folders that may be runs, by name; one that this user may not read (lost+found) is none of theirs."""
    if not checkpoint_dir.is_dir():
        return []
    return sorted(
        path
        for path in checkpoint_dir.iterdir()
        if path.is_dir() and not path.name.startswith(".") and os.access(path, os.R_OK | os.X_OK)
    )


def newest_run(checkpoint_dir: Path) -> Path | None:
    """Return the run whose newest readable checkpoint was committed last, or None."""
    newest: tuple[float, Path] | None = None
    for run_dir in run_folders(checkpoint_dir):
        infos, _ = list_checkpoints(run_dir)
        if infos and (newest is None or infos[-1].created > newest[0]):
            newest = (infos[-1].created, run_dir)
    return newest[1] if newest else None


def newest_valid(run_dir: Path, *, set_aside: bool) -> tuple[CheckpointInfo | None, list[str]]:
    """Return the newest checkpoint whose every byte verifies, and one line for each damaged one passed over.

    With `set_aside`, damaged folders newer than a valid one are renamed to `corrupt-step_...` (never deleted).
    Where none is valid all stay as they are: a later start must not find an empty run and begin afresh.
    """
    damaged: dict[Path, str] = {}
    for folder in reversed(_step_folders(run_dir)):
        try:
            valid = open_checkpoint(folder)
        except CheckpointError as error:
            damaged[folder] = f"damaged checkpoint passed over: {error}"
            continue
        for bad in damaged if set_aside else ():
            aside = bad.with_name(f"corrupt-{bad.name}-{uuid.uuid4().hex[:4]}")
            os.rename(bad, aside)
            damaged[bad] += f"; kept as {aside.name}"
        return valid, list(damaged.values())
    return None, list(damaged.values())


def find(run_dir: Path, target: str) -> CheckpointInfo:
    """Return the checkpoint that `best` or a step number names, every byte verified.

    Raises: CheckpointError if there is none or it is damaged; the message lists what there is.
    """
    name = (
        read_labels(run_dir).get("best") if target == "best" else manifests.folder_name(int(target))
    )
    if name is None or not (run_dir / name).is_dir():
        steps = ", ".join(str(info.step) for info in list_checkpoints(run_dir)[0]) or "none"
        raise CheckpointError(f"{run_dir}: no checkpoint {target!r}; there are: {steps}")
    return open_checkpoint(run_dir / name)


def open_checkpoint(folder: Path) -> CheckpointInfo:
    """Return one checkpoint, every byte verified.

    Raises: CheckpointError if it is missing or damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder; see --list_checkpoints")
    if has_checkpoints(folder):
        raise CheckpointError(
            f"{folder}: a run; name one of its checkpoints, or continue it with "
            f"--run_name {folder.name} --resume latest"
        )
    return _describe(folder, manifests.verify(folder), read_labels(folder.parent))


def supersede(run_dir: Path, step: int) -> list[str]:
    """Move checkpoints newer than `step` (and the labels on them) aside; return their names.

    A run that goes back would otherwise have retention by number delete its new checkpoints first.
    """
    newer = [folder for folder in _step_folders(run_dir) if int(folder.name[5:]) > step]
    if not newer:
        return []
    aside = run_dir / f"{SUPERSEDED}{time.strftime('%Y%m%d-%H%M%S')}"
    if aside.exists():  # twice within a second
        aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:4]}")
    aside.mkdir()
    names = {folder.name for folder in newer}
    for label, target in read_labels(run_dir).items():
        if target in names:
            (run_dir / LABELS / label).unlink()
    for folder in newer:
        os.rename(folder, aside / folder.name)
    return sorted(names)


def retain(
    run_dir: Path, *, keep: int, keep_emergency: int, resumed_from: int | None = None
) -> list[int]:
    """Delete what the retention plan no longer keeps and return the deleted steps.

    Kept: the newest `keep` rolling ones, the newest `keep_emergency` emergency ones, everything labelled, the newest
    of all, and the one this start `resumed_from` until there are two newer ones: a resume can turn out to have been a
    mistake. Folders whose manifest cannot be read are never touched.

    Raises: CheckpointError if only the newest would be left and it does not verify; nothing is deleted then.
    """
    infos, _ = list_checkpoints(run_dir)
    rolling = [info for info in infos if info.kind in ("rolling", "final")]
    emergency = [info for info in infos if info.kind == "emergency"]
    kept = {info.step for info in rolling[-keep:] + emergency[-keep_emergency:] + infos[-1:]}
    kept |= {
        info.step
        for info in infos
        if any(not label.startswith("emergency_") for label in info.labels)
    }
    if resumed_from is not None and sum(info.step > resumed_from for info in infos) < 2:
        kept.add(resumed_from)
    deleted = [info for info in infos if info.step not in kept]
    if deleted and len(infos) - len(deleted) < 2:
        manifests.verify(
            infos[-1].path
        )  # alone it must be sound: what goes may be the last that is
    for info in deleted:
        for label in info.labels:
            (run_dir / LABELS / label).unlink(missing_ok=True)
        faultpoint("retain.before_delete", infos[-1].step)
        doomed = run_dir / f".del-{info.path.name}-{uuid.uuid4().hex[:8]}"
        os.rename(info.path, doomed)  # one step: no reader ever sees a checkpoint that is half gone
        faultpoint("retain.after_rename", infos[-1].step)
        shutil.rmtree(doomed, ignore_errors=True)
    return [info.step for info in deleted]


def sweep(run_dir: Path) -> None:
    """Remove what a killed process left half-written or half-deleted; call only with the run locked."""
    for pattern in (".tmp-*", ".del-*"):
        for leftover in run_dir.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


METRICS = "metrics.jsonl"


def find_folder(name: str, checkpoint_dir: Path) -> Path | None:
    """Return the folder that a run's name (also RUN/step_...) or a path means, None if there is none.

    A run's name wins over a folder of the working directory, so that it means the same everywhere; ./NAME is a path.
    """
    path = paths.from_working_directory(Path(name))
    places = [path] if name.startswith((".", "~", "/")) else [checkpoint_dir / name, path]
    return next((place for place in places if place.is_dir()), None)
