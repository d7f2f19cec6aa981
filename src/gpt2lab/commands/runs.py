"""List, verify, delete, archive and repair runs, send them to a tracker, and continue or import them.

gpt2lab runs list
gpt2lab runs verify my_run
gpt2lab runs list latest --verify
gpt2lab runs rm old_run
gpt2lab runs rm old_run/step_00000250
gpt2lab runs archive old_run --yes
gpt2lab runs import ckpt.pt --run_name taken_over --data_dir data/my_texts
gpt2lab runs import old/model.pt --trust --run_name old
gpt2lab runs sync latest --to trackio
gpt2lab runs rebuild-tensorboard latest
gpt2lab runs repair-log latest
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import FORMAT, MANIFEST
from gpt2lab.commands.checkpoints import List
from gpt2lab.commands.parser import AmongRuns, parse_flags
from gpt2lab.config.flags import RUN, argument, option, required
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import ConfigError, InUseError, SaveError, system_errors_as
from gpt2lab.files import JsonFile, regular, staged_file, sync_folder, temporary_folder
from gpt2lab.runs import history
from gpt2lab.runs.console import doing
from gpt2lab.runs.events import CRC, METRICS, parse_line
from gpt2lab.runs.folder import LOCK, RunFolder, check_entries, holder_of, lock
from gpt2lab.runs.target import find_run

_SHOWN = 20  # damaged lines
_NO_RUN = "no run named; gpt2lab status lists them"
_SETTINGS = {"n_layer", "total_batch_size"}  # in the config.json of a run, in no other program's


@dataclass(frozen=True)
class Verify(AmongRuns):
    """Compare every line of a run's log with its checksum, and every byte of its checkpoints with their hashes.

    Exit code 1 if one differs.
    """

    run: str = argument("name in checkpoints/, or folder")

    def execute(self) -> int:
        """Name what is not as it was written and return the exit code."""
        run_dir = find_run(self.run, checkpoint_dir=self.checkpoint_dir)
        if not _is_run(run_dir):
            _require_log(run_dir)
        damaged, lines, checked = verify_log(run_dir)
        for line in damaged:
            print(line)
        found = fmt.number_of(len(damaged), "problem")
        print(f"{METRICS}: {lines:,} lines, {checked:,} with a checksum; {found}")
        return max(List(str(run_dir), verify=True).execute(), bool(damaged))


@dataclass(frozen=True)
class Import:
    """Make a checkpoint of nanoGPT, or of this project's predecessor, the first one of a run.

    Flags of the trainer are passed on.
    """

    file: str = argument("the .pt file")
    run_name: str | None = option(None, "folder of the run; default MODEL_YYYYmmdd-HHMMSS")
    trust: bool = option(False, "read a file whose settings are pickled objects")


@dataclass(frozen=True)
class Rm(AmongRuns):
    """Delete runs, or single checkpoints given as RUN/step_00000250, with their labels."""

    names: tuple[str, ...] = argument("runs (names or folders), or checkpoints of them")
    yes: bool = option(False, "do not ask")

    def execute(self) -> int:
        """Ask, and delete; return the exit code."""
        folders = _find(self.names, self.checkpoint_dir, sure=self.yes)
        for folder in folders:
            files = (path for name in ("config.json", METRICS) for path in folder.rglob(name))
            if inner := set(filter(_is_run, {path.parent for path in files} - {folder})):
                raise ConfigError(f"{folder}: holds the run {min(inner)}; move it away first")
        return _act(folders, "delete", delete, sure=self.yes)


@dataclass(frozen=True)
class Archive(AmongRuns):
    """Move runs into a folder where no list shows them; moved back they are runs again."""

    names: tuple[str, ...] = argument("runs (names or folders)")
    to: Path | None = option(None, "folder to move them to; default archive/ beside the runs")
    yes: bool = option(False, "do not ask")

    def execute(self) -> int:
        """Ask, and move; return the exit code."""
        folders = _find(self.names, self.checkpoint_dir, sure=self.yes)
        moves: dict[Path, Path] = {}
        for folder in folders:
            if not _is_run(folder):
                raise ConfigError(f"{folder}: not a run; whole runs are archived")
            to = folder.with_name("archive")
            to = to if self.to is None else paths.from_working_directory(self.to)
            above = (to.resolve(), *to.resolve().parents)
            readable = (folder for folder in above if os.access(folder, os.R_OK))
            if (run := next(filter(_is_run, readable), None)) is not None:
                raise ConfigError(f"--to {to}: lies inside the run {run}; choose another --to")
            if os.path.lexists(to / folder.name) or to / folder.name in moves.values():
                raise ConfigError(f"{to / folder.name}: is there already; choose another --to")
            moves[folder] = to / folder.name
        places = ", ".join(sorted({paths.display_path(new.parent) for new in moves.values()}))
        what = f"move to {places}"
        return _act(folders, what, lambda run: archive(run, moves[run]), sure=self.yes)


@dataclass(frozen=True)
class Sync(AmongRuns):
    """Send the metrics that a tracker lacks of runs, also while a run trains."""

    names: tuple[str, ...] = argument("runs (names or folders)")
    to: Literal["wandb", "trackio", "mlflow"] = required("tracker")

    def execute(self) -> int:
        """Send each run and say how much of it; return the exit code."""
        from gpt2lab.tracking import followers as tracking

        if not self.names:
            raise ConfigError(_NO_RUN)
        folders = [find_run(n, self.checkpoint_dir) for n in self.names]
        for folder in folders:
            _require_log(folder)
            check_entries(folder)
        settings = [to_flat(history.read_config(folder)) for folder in folders]
        for folder, flat in zip(folders, settings, strict=True):
            count = tracking.sync(folder.resolve(), self.to, settings=flat)
            said = f"{count:,} events sent to {self.to}" if count else f"{self.to} has all events"
            print(f"{paths.display_path(folder)}: {said}")
        return 0


@dataclass(frozen=True)
class RebuildTensorBoard(AmongRuns):
    """Make a run's TensorBoard files from its metrics.jsonl, also for a run without --use_tensorboard."""

    run: str = argument(RUN)

    def execute(self) -> int:
        """Rebuild and say where."""
        found = find_run(self.run, self.checkpoint_dir)
        from gpt2lab.tracking.tensorboard import rebuild_tensorboard  # torch

        folder, count = rebuild_tensorboard(found)
        print(f"{paths.display_path(folder)}: {count:,} events")
        return 0


@dataclass(frozen=True)
class RepairLog(AmongRuns):
    """Remove the damaged lines of a run's metrics.jsonl; the original stays beside it."""

    run: str = argument(RUN)

    def execute(self) -> int:
        """Repair the log, and say what was removed."""
        run_dir = find_run(self.run, self.checkpoint_dir)
        _require_log(run_dir)
        with contextlib.closing(RunFolder(run_dir)):  # rejected while a trainer writes there
            removed, original = remove_damaged_lines(run_dir / METRICS)
        shown = paths.display_path(run_dir / METRICS)
        for number, what in removed[:_SHOWN]:
            print(f"{shown} line {number:,}: {what}; removed")
        if len(removed) > _SHOWN:
            print(f"and {len(removed) - _SHOWN:,} more")
        done = f"{shown}: no damaged line"
        if original is not None:
            place = paths.display_path(original)
            done = f"{len(removed):,} damaged lines removed; the original is {place}"
        print(done)
        return 0


VERBS = {
    "list": List,
    "verify": Verify,
    "rm": Rm,
    "archive": Archive,
    "sync": Sync,
    "rebuild-tensorboard": RebuildTensorBoard,
    "repair-log": RepairLog,
}


def main(argv: list[str]) -> int:
    """Run the verb that the first word names."""
    return int(parse_flags(VERBS, argv, about=__doc__).execute())


def import_checkpoint(argv: list[str]) -> int:
    """Import the checkpoint of another program."""
    from gpt2lab.commands.train import main as train

    more: list[str] = []
    flags = parse_flags(Import, argv, name="gpt2lab runs import", passed_on=more)
    named = [] if flags.run_name is None else ["--run_name", flags.run_name]
    return train(["--import_checkpoint", flags.file, *["--trust"] * flags.trust, *named, *more])


def _require_log(run_dir: Path) -> None:
    if not (run_dir / METRICS).is_file():
        raise ConfigError(f"{run_dir}: no {METRICS}; not the folder of a run")


def remove_damaged_lines(path: Path) -> tuple[list[tuple[int, str]], Path | None]:
    """Replace a log by its good lines, in one step; return what was removed, by line, and where the original is.

    Raises: SaveError if the folder does not take the new file; the log is then what it was.
    """
    removed: list[tuple[int, str]] = []
    original = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    with (
        open(path, "rb", opener=regular) as log,
        system_errors_as(SaveError, path, what="cannot be repaired", fix="it is what it was"),
    ):
        with staged_file(path) as temporary:
            with open(temporary, "wb") as good:
                for number, line in enumerate(log, start=1):
                    try:
                        parse_line(line)
                        good.write(line.removesuffix(b"\n") + b"\n")
                    except ValueError as error:
                        removed.append((number, str(error)))
                good.flush()
                os.fsync(good.fileno())
            if not removed:
                return [], None
            os.link(path, original)  # before the rename: at no moment is there no log
            os.replace(temporary, path)
        sync_folder(path.parent)
    return removed, original


def verify_log(run_dir: Path) -> tuple[list[str], int, int]:
    """Return a line for each damage of a run's log, the number of its lines, and how many have a checksum."""
    path, damaged, number, checked = run_dir / METRICS, [], 0, 0
    if not path.exists():
        return [f"{path}: lost"], 0, 0
    with system_errors_as(ConfigError, path), open(path, "rb", opener=regular) as file:
        for number, line in enumerate(file, start=1):
            checked += CRC in line
            try:
                parse_line(line)
            except ValueError as error:
                damaged.append(f"{path} line {number:,}: {error}")
    if not damaged:
        log, (saved, _) = history.open_log(run_dir), catalog.list_checkpoints(run_dir)
        damaged = [f"{path}: {gap}" for gap in _missing_steps(log)]
        last = max([0, *log.numbers.tolist(), *(event["step"] for event in log.events)])
        if saved and saved[-1].step > last and saved[-1].kind != "average":  # it trained nothing
            damaged.append(f"{path}: no line after step {last:,}; step {saved[-1].step:,} is saved")
    return damaged, number, checked


def _missing_steps(log: history.Log) -> list[str]:
    """Name the steps that were logged before later ones and that are not there, such as deleted lines."""
    steps, before = log.steps.astype(int), np.roll(log.steps, 1).astype(int)
    for row in np.flatnonzero(np.diff(log.attempts, prepend=0)).tolist():
        begin = log.begin_of(int(log.attempts[row]))
        first = begin["step"] if begin else steps[row] - 1
        before[row] = min(first, steps[:row].max()) if row else first
    return [
        f"no steps {before[row] + 1:,} to {steps[row] - 1:,} before step {steps[row]:,} of start {log.attempts[row]}"
        for row in np.flatnonzero(steps > before + 1).tolist()
    ]


def delete(folder: Path) -> None:
    """Delete a run, or a checkpoint with its labels, unless somebody trains there.

    Raises: ConfigError.
    """
    with _locked(_run_of(folder)):
        if not _is_run(folder):
            for label in _labels_of(folder):
                (folder.parent / catalog.LABELS / label).unlink(missing_ok=True)
        doomed = folder.with_name(f".del-{folder.name}-{uuid.uuid4().hex[:8]}")
        os.rename(folder, doomed)  # one rename: no reader sees half of it
        told = system_errors_as(SaveError, doomed, what="not deleted whole")
        with told, contextlib.suppress(FileNotFoundError):  # another `runs rm` helps
            shutil.rmtree(doomed)
    for left in folder.parent.glob(f".del-*-{8 * '[0-9a-f]'}"):  # by a program that was killed
        shutil.rmtree(left, ignore_errors=True)


def archive(run_dir: Path, to: Path) -> None:
    """Move a run to the path `to`, also on another disk, unless somebody trains there.

    Raises: ConfigError; SaveError.
    """
    with _locked(run_dir), system_errors_as(SaveError, to, what="the run cannot be moved there"):
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(run_dir, to)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        with temporary_folder(to) as staging:  # the copy is complete before the original goes
            try:
                copy = shutil.copytree(run_dir, staging / to.name, symlinks=True)
            except shutil.Error as error:
                raise OSError(error.args[0][0][2]) from None
            os.rename(copy, to)
        sync_folder(to.parent)
        with system_errors_as(SaveError, run_dir, what=f"copied to {to}, and not deleted whole"):
            shutil.rmtree(run_dir)


def _find(names: Sequence[str], checkpoint_dir: Path | None, *, sure: bool = False) -> list[Path]:
    """Return the runs and checkpoints that names mean, each once.

    A checkpoint goes with its run, so it counts only where that is not named too. Where nobody is asked (`sure`), a
    name must be in full: the beginning of a name means another run once the first is gone.
    """
    if not names:
        raise ConfigError(_NO_RUN)
    found: list[Path] = []
    for name in names:
        typed = find_run(name, checkpoint_dir, or_checkpoint=True)
        if sure and catalog.find_folder(name, paths.runs_folder(checkpoint_dir)) is None:
            raise ConfigError(
                f"{name}: with --yes give the name in full: {paths.display_path(typed)}"
            )
        folder = typed.resolve()
        if name.endswith("@latest") and folder.name != name:  # elsewhere it means the run
            raise ConfigError(f"{name}: give a step, or the run alone")
        if os.path.islink(os.path.normpath(typed)):
            raise ConfigError(f"{typed}: a link to {folder}; name that folder, and remove the link")
        if not _is_run(folder) and not _is_checkpoint(folder):
            raise ConfigError(f"{folder}: neither a run nor a checkpoint; nothing is deleted")
        if (holder := holder_of(_run_of(folder))) is not None:
            raise InUseError(f"{folder}: in use by {holder}; stop it first")
        if folder not in found:
            found.append(folder)
    return [folder for folder in found if not set(folder.parents) & set(found)]


def _is_run(folder: Path) -> bool:
    """Tell whether a folder is surely a run of ours; other programs write a metrics.jsonl or config.json too."""
    settings = _read(folder / "config.json").keys()
    return settings >= _SETTINGS or bool(catalog.list_checkpoints(folder)[0])


def _is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder is a checkpoint of ours, also one set aside; its own hash may be wrong."""
    if re.fullmatch(r"(corrupt-)?step_[0-9]{8,}(-[0-9a-f]{4})?", folder.name) is None:
        return False
    manifest = _read(folder / MANIFEST)
    return manifest.get("format") == FORMAT and _is_run(_run_of(folder))


def _read(path: Path) -> dict[str, Any]:
    try:
        return JsonFile(path, ConfigError).read()
    except ConfigError:
        return {}


def _run_of(folder: Path) -> Path:
    """Return the run that a folder is or lies in, also in superseded-..., where checkpoints are set aside."""
    run = folder if _is_run(folder) else folder.parent
    is_aside = run.name.startswith(catalog.SUPERSEDED) and _is_run(run.parent)
    return run.parent if is_aside else run


def _labels_of(checkpoint: Path) -> list[str]:
    labels = catalog.read_labels(checkpoint.parent).items()
    return sorted(label for label, target in labels if target == checkpoint.name)


def _describe(folder: Path) -> str:
    """Say what would be lost: checkpoints, bytes and labels."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    size = fmt.num_bytes(sum(path.stat().st_size for path in files))
    if not _is_run(folder):
        labels = _labels_of(folder)
        return f"{size}" + (f", labelled {', '.join(labels)}" if labels else "")
    infos, _ = catalog.list_checkpoints(folder)
    labels = sorted(label for label, step in catalog.read_labels(folder).items() if step)
    last = f" up to step {infos[-1].step:,}" if infos else ""
    count = fmt.number_of(len(infos), "checkpoint")
    return f"{count}{last}, {size}" + (f", labels {', '.join(labels)}" if labels else "")


def _act(folders: list[Path], what: str, act: Callable[[Path], None], *, sure: bool) -> int:
    """Do it to each folder once somebody saw what is there and agreed; return the exit code."""
    for folder in folders:
        print(f"{paths.display_path(folder)}: {_describe(folder)}")
    if not sure:
        if not sys.stdin.isatty():
            raise ConfigError("stdin is not a terminal, so nothing was asked or changed; add --yes")
        print(f"{what}? [y/N] ", end="", flush=True)
        with doing(""):
            answer = sys.stdin.readline().strip().lower()
        if answer not in ("y", "yes"):
            print("nothing was changed")
            return 1
    for folder in folders:
        act(folder)
    print(f"done ({what}): {', '.join(paths.display_path(folder) for folder in folders)}")
    return 0


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock, so that no start begins there meanwhile."""
    with open(run_dir / LOCK, "a", opener=regular) as file:
        try:
            lock(file)
        except OSError:
            holder = holder_of(run_dir) or "another process"
            raise InUseError(f"{run_dir}: in use by {holder}; stop it first") from None
        yield
