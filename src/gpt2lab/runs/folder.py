"""A run's folder on disk: lock, config.json, run.json, status.json. Only rank 0 uses it."""

import contextlib
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gpt2lab import __version__
from gpt2lab.checkpoint import catalog
from gpt2lab.errors import ConfigError, FolderLostError, InUseError, system_errors_as
from gpt2lab.files import regular, replace_durably, sync_folder, wrong_kind
from gpt2lab.paths import IS_CHECKOUT, REPOSITORY
from gpt2lab.runs.events import METRICS

LOCK, LOG, BRANCHES = "run.lock", "log.txt", "branches.jsonl"
_APPENDED = (LOCK, METRICS, LOG)
_FOLDERS = [
    "labels",
    "evaluations",
    "validation",
    "hellaswag",
    "tensorboard",
    "trackers",
    "heartbeat",
    "wandb",
]


class RunFolder:
    """The folder of one run, locked for as long as the process lives."""

    def __init__(self, path: Path) -> None:
        """Create and lock the folder; remove what a killed process left half-written.

        Raises: ConfigError if it cannot be written to, InUseError if another process trains in it.
        """
        self.path = path
        self.facts: dict[str, Any] = {}  # of this start, in every status
        self._status: dict[str, Any] = {"state": "running", "step": 0}  # as it was asked for last
        check_entries(path)
        with system_errors_as(
            ConfigError, path, what="cannot write there", fix="choose another --checkpoint_dir"
        ):
            new = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            # A power cut that spares a checkpoint must spare the way to it.
            for folder in {path, *new}:
                with contextlib.suppress(PermissionError):  # it may be another user's
                    sync_folder(folder.parent)
            self._lock: IO[str] = open(path / LOCK, "a+", opener=regular)  # noqa: SIM115
        try:
            lock(self._lock)
        except OSError as error:
            self._lock.close()
            holder = holder_of(path) or "another process"
            raise InUseError(
                f"{path}: in use by {holder}; wait for it, stop it, or choose another --run_name"
            ) from error
        catalog.sweep(path)
        self._write_holder()
        self._place = os.stat(path)

    def _write_holder(self) -> None:
        """Write into the lock who holds it, and remember which file it is."""
        with contextlib.suppress(OSError):  # a full disk: the name is only for the message
            os.ftruncate(self._lock.fileno(), 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}\n"
            os.write(self._lock.fileno(), holder.encode())
        self._locked = os.fstat(self._lock.fileno())

    def check_lock(self) -> str | None:
        """Check that this process still holds the folder's lock; return a warning if a deleted lock was made again.

        A lock protects as long as its file has its name. Where that was deleted, and nobody else was there meanwhile,
        a new one is made; a file of another start is never touched.

        Raises: FolderLostError if the folder is gone, or belongs to another start.
        """
        path = self.path / LOCK
        try:
            if os.path.samestat(os.stat(path), self._locked):
                return None
        except (FileNotFoundError, NotADirectoryError):
            self._lock_again(path)
            return f"{path}: was deleted while training, and is made again; delete none of a run that trains"
        except OSError:  # of a network disk, for a moment: writing there will say more
            return None
        raise FolderLostError(
            f"{self.path}: another start took this run while this one trained (run.lock is another file); "
            f"this one ends and leaves the run to it"
        )

    def require_lock(self) -> None:
        """Raises: OSError if the lock's file is gone or another; `check_lock` says what to do, in the main thread."""
        if not os.path.samestat(os.stat(self.path / LOCK), self._locked):
            raise OSError(f"{self.path / LOCK} is another file")

    def _lock_again(self, path: Path) -> None:
        again: IO[str] | None = None
        try:
            if not os.path.samestat(os.stat(self.path), self._place):
                raise FileNotFoundError
            # Exclusively: an existing file would be that of another start, also of one that has ended.
            again = open(path, "x+", opener=regular)  # noqa: SIM115
            lock(again)
            self._lock, again = again, self._lock
        except (FileNotFoundError, NotADirectoryError):
            raise FolderLostError(
                f"{self.path}: moved or deleted while training; nothing can be saved there, put it back (if it was "
                f"moved) and continue with --resume latest"
            ) from None
        except OSError as error:
            raise FolderLostError(
                f"{path}: deleted while training, and cannot be made again ({error.strerror}); "
                f"this start ends; continue with --resume latest"
            ) from error
        finally:
            if again is not None:
                again.close()
        self._write_holder()

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    def write_config(
        self, settings: dict[str, Any], facts: dict[str, Any], files: Mapping[str, bytes]
    ) -> None:
        """Write config.json (the settings of this start, see `settings.record`), run.json (its environment)
        and the tokenizer's files.
        """
        for name, content in files.items():
            replace_durably(self.path / name, content)
        replace_durably(self.path / "config.json", json.dumps(settings, indent=1) + "\n")
        replace_durably(self.path / "run.json", json.dumps(facts, indent=1) + "\n")

    def record_in_trunk(self, branch: Mapping[str, Any]) -> str | None:
        """Add this run to branches.jsonl of the run that it is a branch of; return a warning if that cannot be."""
        path = Path(branch["folder"]).with_name(BRANCHES)
        try:
            with open(path, "a", opener=regular) as file:
                file.write(json.dumps({"folder": str(self.path), "step": branch["step"]}) + "\n")
        except OSError as error:  # it may be another user's
            return f"{path}: {error.strerror}; that run will not list this branch"
        return None

    def write_status(
        self, state: str, *, step: int, reason: str | None = None, exit_code: int | None = None
    ) -> None:
        """Replace status.json: running | completed | stopped | failed, and how a start ended.

        torchrun reports 1 for every stop by signal; this file has the trainer's own exit code. A start that was
        killed leaves `running` with the id of the dead process.
        """
        self._status = {"state": state, "step": step, "reason": reason, "exit_code": exit_code}
        infos, _ = catalog.list_checkpoints(self.path)
        status = {
            **self._status,
            "checkpoint": str(infos[-1].path) if infos else None,
            **(self.facts if infos else self.facts | {"resume": None}),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
        }
        replace_durably(self.path / "status.json", json.dumps(status, indent=1) + "\n")

    def add_to_status(self, **facts: Any) -> None:
        """Write status.json again with more facts, which every later one has too.

        Raises: OSError.
        """
        self.facts |= facts
        self.write_status(**self._status)


def check_entries(run_dir: Path) -> None:
    """Check that no file of a run that is appended to, and no folder in it, is a link, a pipe or the like.

    Its other files are replaced when they are written: a link gives way to a file, and its target stays as it was.

    Raises: ConfigError.
    """
    folders = (*map(run_dir.joinpath, _FOLDERS), *run_dir.glob("evaluations/step_*[0-9]"))
    for path in (*map(run_dir.joinpath, _APPENDED), *folders):
        wanted = "folder" if path in folders else "file"
        if (problem := wrong_kind(path, wanted=wanted)) is not None:
            raise ConfigError(f"{path}: {problem}; remove it, or choose another --run_name")


def lock(file: IO[str]) -> None:
    """Lock a file; retry twice, because `gpt2lab status` holds the lock for a moment.

    Raises: OSError if it stays locked.
    """
    for pause in (0.05, 0.2):
        with contextlib.suppress(OSError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder_of(run_dir: Path) -> str | None:
    """Return the process that trains in a folder, as `process 17 on host`, None if none does."""
    try:
        with open(run_dir / LOCK, opener=regular) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
    except OSError:
        pass
    return None


def provenance(torch_version: str) -> dict[str, Any]:
    """Return the versions that a result depends on, and the commit where there is one."""
    import numpy

    return {
        "gpt2lab": __version__,
        "python": platform.python_version(),
        "torch": torch_version,
        "numpy": numpy.__version__,
        "git": git_commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def git_commit() -> str | None:
    """Return the checkout's commit, with -dirty if it was changed; None where gpt2lab is installed."""
    if not IS_CHECKOUT:
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
