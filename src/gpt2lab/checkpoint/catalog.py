"""The checkpoints of a run: list, choose, label, delete. Reads manifests and headers of weights; no torch."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import manifest as manifests
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import read_settings
from gpt2lab.errors import CheckpointError, ConfigError
from gpt2lab.files import read_regular, replace_durably, sweep_temporaries, sync_folder
from gpt2lab.model.counts import check_shapes, count_adapters, count_parameters, read_shapes

LABELS = "labels"
WEIGHTS = "model.safetensors"
SUPERSEDED = "superseded-"
_NO_LABEL = (errno.ENOENT, errno.ELOOP, errno.E2BIG)  # deleted meanwhile, no file, too large


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, as its manifest describes it."""

    path: Path
    step: int
    kind: str
    tokens: int
    val_loss: float | None
    created: float
    num_bytes: int
    labels: tuple[str, ...]
    manifest: dict[str, Any]

    def config(self) -> Config:
        """Return the settings that it was trained with.

        Raises: CheckpointError if they are invalid, or do not match the weights.
        """
        try:
            # Older versions had an fp32 residual stream and no setting for it.
            config = read_settings({"residual_dtype": "fp32", **self.manifest["config"]})
        except ConfigError as error:
            raise CheckpointError(f"{self.path / manifests.MANIFEST}: {error}") from error
        path = self.path / WEIGHTS
        shapes = read_shapes(path)
        check_shapes(path, shapes, config.model, rows=config.model.vocab_size)
        wanted = count_parameters(config.model) + count_adapters(config.model, config.tuning)
        if (found := sum(map(math.prod, shapes.values()))) != wanted:
            raise CheckpointError(f"{path}: holds {found:,} values, its settings mean {wanted:,}")
        return config


def _step_folders(run_dir: Path) -> list[Path]:
    """Return the folders named like checkpoints, oldest first."""
    try:
        entries = list(os.scandir(run_dir))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(
        Path(entry.path)
        for entry in entries
        if entry.name.startswith("step_")
        and entry.name[5:].isdecimal()
        and entry.is_dir(follow_symlinks=False)
    )


def list_checkpoints(
    run_dir: Path, *, labels: dict[str, str] | None = None
) -> tuple[list[CheckpointInfo], list[CheckpointError]]:
    """Return the run's checkpoints, oldest first, and an error for each folder with an invalid manifest.

    `labels` are those of the run, read here by default.
    """
    labels = read_labels(run_dir) if labels is None else labels
    infos, damaged = [], []
    for folder in _step_folders(run_dir):
        try:
            infos.append(checkpoint_info(folder, manifests.read_manifest(folder), labels))
        except CheckpointError as error:
            damaged.append(error)
    return sorted(infos, key=lambda info: info.step), damaged


def checkpoint_info(
    folder: Path, manifest: dict[str, Any], labels: dict[str, str]
) -> CheckpointInfo:
    """Return a checkpoint as its manifest describes it; `labels` are those of the run."""
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


def read_labels(run_dir: Path, *, strict: bool = False) -> dict[str, str]:
    """Return {label: folder name}, e.g. {'best': 'step_00000250'}.

    Raises: OSError with `strict` if a label exists but cannot be read.
    """
    folder = run_dir / LABELS
    if not folder.is_dir() or folder.is_symlink():
        return {}
    found = {}
    for path in folder.iterdir():
        if not path.name.startswith("."):
            try:
                found[path.name] = read_regular(path, at_most=100).decode(errors="replace").strip()
            except OSError as error:
                if strict and error.errno not in _NO_LABEL:
                    raise
    return found


def set_label(run_dir: Path, label: str, step: int) -> None:
    """Point a label at a step; a new `best` moves the old one to `best_prev`."""
    (run_dir / LABELS).mkdir(exist_ok=True)
    target = manifests.folder_name(step)
    previous = read_labels(run_dir).get(label)
    if label == "best" and previous not in (None, target):
        replace_durably(run_dir / LABELS / "best_prev", f"{previous}\n")
    replace_durably(run_dir / LABELS / label, f"{target}\n")


def run_folders(checkpoint_dir: Path) -> list[Path]:
    """Return the folders that may be runs, sorted by name, without those that this user cannot read (lost+found)."""
    if not checkpoint_dir.is_dir():
        return []
    return sorted(
        path
        for path in checkpoint_dir.iterdir()
        if path.is_dir() and not path.name.startswith(".") and os.access(path, os.R_OK | os.X_OK)
    )


def newest_run(checkpoint_dir: Path) -> Path | None:
    """Return the run whose newest readable checkpoint was committed last, or None."""
    newest = [
        infos[-1] for run in run_folders(checkpoint_dir) if (infos := list_checkpoints(run)[0])
    ]
    return max(newest, key=lambda info: info.created).path.parent if newest else None


def newest_valid(run_dir: Path, *, set_aside: bool) -> tuple[CheckpointInfo | None, list[str]]:
    """Return the newest checkpoint of which every byte verifies, and one line for each damaged one that was skipped.

    With `set_aside`, damaged folders newer than a valid one are renamed to `corrupt-step_...` (never deleted).
    If none is valid, nothing is renamed: a later start must not mistake the run for an empty one.
    """
    damaged: dict[Path, str] = {}
    for folder in reversed(_step_folders(run_dir)):
        try:
            valid = open_checkpoint(folder)
        except CheckpointError as error:
            if isinstance(error.__cause__, PermissionError):  # nothing says that it is damaged
                raise
            damaged[folder] = f"damaged checkpoint skipped: {error}"
            continue
        for bad in damaged if set_aside else ():
            aside = bad.with_name(f"corrupt-{bad.name}-{uuid.uuid4().hex[:4]}")
            os.rename(bad, aside)
            damaged[bad] += f"; kept as {aside.name}"
        return valid, [*damaged.values()]
    return None, [*damaged.values()]


def find(run_dir: Path, target: str) -> CheckpointInfo:
    """Return the checkpoint that a label, such as `best`, or a step number names, every byte verified.

    Raises: CheckpointError if there is none or it is damaged; the message lists what there is.
    """
    is_step = target.isdecimal() and len(target) < 19  # longer ones are no name of a folder
    name = manifests.folder_name(int(target)) if is_step else read_labels(run_dir).get(target)
    if name is not None and not manifests.is_folder_name(name):
        raise CheckpointError(
            f"{run_dir / LABELS / target}: {name!r:.60} is not the name of a checkpoint; "
            f"choose one of --list_checkpoints by its step"
        )
    if name is None or not (run_dir / name).is_dir():
        steps = ", ".join(str(info.step) for info in list_checkpoints(run_dir)[0]) or "none"
        raise CheckpointError(f"{run_dir}: no checkpoint {target!r:.60}; there are: {steps}")
    return open_checkpoint(run_dir / name)


def open_checkpoint(folder: Path) -> CheckpointInfo:
    """Verify every byte of one checkpoint and return it.

    Raises: CheckpointError if it is missing or damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder; see --list_checkpoints")
    if has_checkpoints(folder):
        raise CheckpointError(
            f"{folder}: a run; name one of its checkpoints, or continue it with "
            f"--run_name {folder.name} --resume latest"
        )
    return checkpoint_info(folder, manifests.verify(folder), read_labels(folder.parent))


def newer_than(run_dir: Path, step: int) -> list[Path]:
    """Return the checkpoints, readable or not, of later steps, oldest first."""
    return [folder for folder in _step_folders(run_dir) if int(folder.name[5:]) > step]


def supersede(run_dir: Path, step: int, *, best: int | None) -> list[str]:
    """Set checkpoints newer than `step` and their labels aside; return their names. `best`: the best step left.

    Otherwise retention by step number would delete the new checkpoints of a run that goes back to an earlier step.
    """
    names = [folder.name for folder in newer_than(run_dir, step)]
    if names:
        _set_aside(run_dir, names)
    if best is not None and (run_dir / manifests.folder_name(best)).is_dir():
        set_label(run_dir, "best", best)
    return names


def _set_aside(run_dir: Path, names: list[str]) -> None:
    aside = run_dir / f"{SUPERSEDED}{time.strftime('%Y%m%d-%H%M%S')}"
    if aside.exists():  # the second time within a second
        aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:4]}")
    aside.mkdir()
    for label, target in read_labels(run_dir).items():
        if target in names:
            (run_dir / LABELS / label).unlink()
    for name in names:
        os.rename(run_dir / name, aside / name)
    # Before the log says that the run continues from an earlier step.
    sync_folder(aside)
    sync_folder(run_dir)


def retain(
    run_dir: Path, *, keep: int, keep_emergency: int, resumed_from: int | None = None
) -> list[int]:
    """Delete what the retention plan no longer keeps and return the deleted steps.

    Kept: the newest `keep` rolling ones, the newest `keep_emergency` emergency ones, everything labelled, the newest
    of all, and the one this start `resumed_from` until there are two newer ones, because a resume can be a mistake.
    Folders whose manifest cannot be read are never touched.

    Raises: CheckpointError if only the newest would be left and it does not verify, OSError if a label cannot be read;
    nothing is deleted then.
    """
    infos, _ = list_checkpoints(run_dir, labels=read_labels(run_dir, strict=True))
    kept = {info.step for info in to_keep(infos, keep=keep, keep_emergency=keep_emergency)}
    if resumed_from is not None and sum(info.step > resumed_from for info in infos) < 2:
        kept.add(resumed_from)
    deleted = [info for info in infos if info.step not in kept]
    if deleted and len(infos) - len(deleted) < 2:
        manifests.verify(infos[-1].path)  # the only one left must be intact
    for info in deleted:
        for label in info.labels:
            (run_dir / LABELS / label).unlink(missing_ok=True)
        faultpoint("retain.before_delete", infos[-1].step)
        doomed = run_dir / f".del-{info.path.name}-{uuid.uuid4().hex[:8]}"
        os.rename(info.path, doomed)  # one rename: no reader sees half a checkpoint
        sync_folder(run_dir)  # nor after a power cut that keeps the deletions but not the rename
        faultpoint("retain.after_rename", infos[-1].step)
        shutil.rmtree(doomed, ignore_errors=True)
    return [info.step for info in deleted]


def to_keep(infos: list[CheckpointInfo], *, keep: int, keep_emergency: int) -> list[CheckpointInfo]:
    """Return the checkpoints that retention keeps, some twice: by kind, by label, and the newest.

    `infos`: oldest first.
    """
    rolling = [info for info in infos if info.kind != "emergency"]
    emergency = [info for info in infos if info.kind == "emergency"]
    return [
        *(rolling[-keep:] + emergency[-keep_emergency:] + infos[-1:]),
        *(info for info in infos if is_labelled(info)),
    ]


def is_labelled(info: CheckpointInfo) -> bool:
    """Tell whether a label keeps a checkpoint; those of emergencies do not."""
    return any(not label.startswith("emergency_") for label in info.labels)


def sweep(run_dir: Path) -> None:
    """Remove what a killed process left half-written or half-deleted; call only with the run locked."""
    for pattern in (".tmp-*", ".del-*"):
        for leftover in run_dir.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    # A power cut, or a disk that fails, also keeps the new versions of small files: of status.json, of a label.
    with contextlib.suppress(OSError):
        inside = [path for path in run_dir.iterdir() if path.is_dir() and not path.is_symlink()]
        for folder in (run_dir, *inside):
            sweep_temporaries(folder)


def find_folder(name: str, checkpoint_dir: Path) -> Path | None:
    """Return the folder that a run's name (also RUN/step_...) or a path means, None if there is none.

    A run's name wins over a folder of the working directory, so that it means the same everywhere; ./NAME is a path.
    """
    path = paths.from_working_directory(Path(name))
    places = [path] if name.startswith((".", "~", "/")) else [checkpoint_dir / name, path]
    return next((place for place in places if name and place.is_dir()), None)


@dataclass(frozen=True)
class DiskBudget:
    """The disk space of a run before it starts, in bytes."""

    folder: Path  # the nearest existing one, on the same disk as the run
    free: int
    held: int  # by existing checkpoints, which later ones replace
    needed: int  # by all checkpoints that the retention plan keeps

    @property
    def fits(self) -> bool:
        """Tell whether the retention plan fits."""
        return self.free + self.held >= self.needed

    def shortage(self) -> tuple[str, ...]:
        """Return a warning if the retention plan does not fit, or is over 1 GB and a tenth of what is free."""
        if self.fits and self.needed <= max(1e9, (self.free + self.held) / 10):
            return ()
        fix = "lower --keep_checkpoints, set --epoch_checkpoints off, or choose another --checkpoint_dir"
        return (f"disk of {self.folder}: {self.describe()}; {fix}",)

    def describe(self) -> str:
        """Return the bytes needed and free as text."""
        held = f" and {fmt.num_bytes(self.held)} in its checkpoints" if self.held else ""
        return (
            f"the checkpoints to be kept need {fmt.num_bytes(self.needed)}, "
            f"{fmt.num_bytes(self.free)} free{held}"
        )


def disk_budget(run_dir: Path, needed: int) -> DiskBudget:
    """Return the disk space of a run that needs this many bytes for its checkpoints."""
    folder = run_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    infos, _ = list_checkpoints(run_dir)
    return DiskBudget(
        folder=folder,
        free=shutil.disk_usage(folder).free,
        held=sum(info.num_bytes for info in infos),
        needed=needed,
    )
