"""What `--checkpoint_mirror` adds to a run: it fetches what is newer, copies every checkpoint, and waits at the end."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.checkpoint.manifest import read_manifest
from gpt2lab.config.request import RunRequest
from gpt2lab.errors import (
    CheckpointError,
    ConfigError,
    FolderLostError,
    GPT2LabError,
    UnreachableError,
    first_line,
)
from gpt2lab.files import read_regular, replace_durably
from gpt2lab.mirror.storage import Copy, connect, copy_name, run_id
from gpt2lab.mirror.upload import Uploader
from gpt2lab.runs import history
from gpt2lab.runs.events import METRICS, Event
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.overview import describe_mirror
from gpt2lab.training.extension import Extension, LiveRun
from gpt2lab.training.start import Start
from gpt2lab.training.stop import Signals, launcher_grace_seconds

if TYPE_CHECKING:
    from gpt2lab.distributed.runtime import Runtime

WAIT_SECONDS = 600.0  # for the last copy, at an end without a signal
_GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL: torchrun's, Slurm's and Kubernetes' default
_MARGIN_SECONDS = 10.0  # to end in, of that


class CheckpointMirror(Extension):
    """Copies every checkpoint of a run to object storage. Training neither waits for it nor ends by it."""

    def __init__(self) -> None:
        self._warnings: list[str] = []
        self._uploader: Uploader | None = None
        self._run: LiveRun | None = None
        self._is_typed = self._is_used = False

    def requested(self, request: RunRequest) -> None:
        """Fetch a newer checkpoint, and reject a mirror that cannot be one of this run.

        Raises: ConfigError, CheckpointError.
        """
        self._is_typed = "checkpoint_mirror" in request.chosen
        if (found := find_mirrored(request)) is None:
            return
        url, run_dir = found
        if not self._is_typed and not may_use(url, run_dir, is_typed=False):
            said = "used if typed: the checkpoint names it, and nobody did on this machine"
            self._warnings = [f"--checkpoint_mirror {fmt.word_of_bash(url)} is only {said}"]
            return
        if request.resume in ("latest", "auto"):
            newest, damaged = catalog.newest_valid(run_dir, set_aside=True)
            tell = functools.partial(print, flush=True)
            self._warnings = damaged + fetch_newer(url, run_dir, newest, tell=tell)
        elif (wanted := request.resume or "") == "best" or wanted.isdecimal():
            infos, _ = catalog.list_checkpoints(run_dir)
            name = str(int(wanted)) if wanted.isdecimal() else wanted
            if not any(name in (str(info.step), *info.labels) for info in infos):
                raise CheckpointError(
                    f"{run_dir}: no checkpoint {name}; --resume latest fetches the newest one from {url}"
                )
        if (warning := check_mirror(url, run_dir, request)) is not None:
            self._warnings.append(warning)

    def resolved(self, start: Start, runtime: Runtime, signals: Signals) -> None:
        """Give this machine the checkpoint that rank 0 chose; of a complete run, copy what its last start could not."""
        url, run_dir = start.config.checkpoint.checkpoint_mirror or "", start.run_dir
        is_typed = self._is_typed or start.checkpoint is None
        self._is_used = runtime.on_rank_zero(
            lambda: bool(url) and may_use(url, run_dir, is_typed=is_typed)
        )
        if not self._is_used:
            return
        if runtime.local_rank == 0:
            may_use(url, run_dir, is_typed=True)
        if start.is_complete:
            if runtime.rank == 0:  # the other ranks wait in a barrier
                catch_up_after_end(start, signals, most=runtime.timeout_seconds / 2)
        elif runtime.local_rank == 0:
            fetch_on_this_machine(start)

    def started(self, run: LiveRun) -> None:
        """Begin to copy what the mirror lacks."""
        self._run = run
        for warning in self._warnings:
            run.logger.warn(warning, run.components.state.step)
        if self._is_used:
            self._uploader = open_uploader(run.start)

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Copy a checkpoint that was committed, and pass on what the copies have to say."""
        if self._uploader is None:
            return
        if event["event"] == "checkpoint":
            self._uploader.notify_saved()
        elif event["event"] == "step":
            self._report(event["step"])

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Give the last copy some time to arrive, when all else is on disk."""
        # Another start may use a folder that was lost.
        if self._uploader is None or self._run is None or isinstance(error, FolderLostError):
            return
        run = self._run
        most = run.timeout_seconds / 2  # the other ranks wait in a barrier
        limit = wait_limit(
            run.signals, run.start.deadlines, most=most, has_failed=error is not None
        )
        self._uploader.finish(limit)
        self._report(run.logger.newest_step)

    def _report(self, step: int) -> None:
        if self._uploader is None or self._run is None:
            return
        if (news := self._uploader.take_report()) is None:
            return
        report, warnings = news
        for warning in warnings:
            self._run.logger.warn(warning, step)
        try:
            self._run.folder.add_to_status(mirror=asdict(report))
        except OSError as error:
            self._run.logger.warn(f"status.json: {error.strerror}", step)


def may_use(url: str, run_dir: Path, *, is_typed: bool) -> bool:
    """Tell whether a person chose a mirror: now, or before for this folder on this machine; a checkpoint must not.

    What is typed is noted for later starts.
    """
    name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    record = paths.of_user("XDG_STATE_HOME", ".local/state") / "gpt2lab" / "mirrors" / name
    with contextlib.suppress(OSError):  # no home folder: then every start has to name it
        if not is_typed:
            return read_regular(record, at_most=10_000) == url.encode()
        record.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(record, url)
    return is_typed


def find_mirrored(request: RunRequest) -> tuple[str, Path] | None:
    """Return the mirror and folder of the run that a request means, if it has one: as chosen, else as its newest says.

    Raises: ConfigError if the run to resume is not named.
    """
    asked, resume = request.config.checkpoint, request.resume
    run_dir = asked.checkpoint_dir / (asked.run_name or "new")
    if resume in ("latest", "auto", "best") or (resume or "").isdecimal():
        found = run_dir if asked.run_name else catalog.newest_run(asked.checkpoint_dir)
        if found is None and asked.checkpoint_mirror is not None:
            raise ConfigError(
                f"{asked.checkpoint_dir}: no run to resume; name the one to fetch from --checkpoint_mirror with "
                f"--run_name"
            )
        run_dir = found or run_dir
    elif resume is not None:
        run_dir = paths.from_working_directory(Path(resume)).parent
    infos = catalog.list_checkpoints(run_dir)[0] if resume is not None else []
    url = asked.checkpoint_mirror
    if infos and "checkpoint_mirror" not in request.chosen:
        saved = infos[-1].manifest["config"].get("checkpoint_mirror")
        url = saved if isinstance(saved, str) else None
    return None if url is None else (url, run_dir)


def fetch_newer(
    url: str, run_dir: Path, newest: CheckpointInfo | None, *, tell: Callable[[str], None]
) -> list[str]:
    """Fetch the mirror's newest sound checkpoint if it is newer than the run's own; return warnings.

    `tell` gets a line before a download. The log of a start that saved nothing here is kept beside the mirror's.

    Raises: ConfigError for a wrong URL or another run's mirror; CheckpointError if the run has no checkpoint here and
    the mirror cannot say or give one: whether the run has begun would be a guess.
    """
    mirror, own, log = connect(url, run_dir.name), run_id(run_dir), history.read_log(run_dir)
    has_saved = catalog.has_checkpoints(run_dir) or bool(log.of_kind("checkpoint"))
    try:
        (copies, problems), owner = mirror.in_time(lambda: (mirror.list_copies(), mirror.owner()))
        is_another = bool(copies) and own is not None and owner != own
        if is_another and has_saved:
            raise ConfigError(
                f"{run_dir}: another run than the one whose checkpoints are in {mirror.url}; "
                f"choose another --run_name or --checkpoint_dir"
            )
        warnings = [f"copy in the mirror skipped: {problem}" for problem in problems]
        # The log of a start that saved nothing, before the run began anew elsewhere, knows nothing of the copies.
        events = [] if is_another else log.of_kind("begin", "rewind", "checkpoint")
        for copy in copies:
            is_older = newest is not None and copy.step <= newest.step
            if is_older or _is_left_behind(copy, events):
                continue
            try:
                size = fmt.num_bytes(sum(file["bytes"] for file in copy.manifest["files"].values()))
                tell(f"fetching step {copy.step} ({size}) from {mirror.url}")
                # Locked, and swept of what a killed download left.
                with contextlib.closing(RunFolder(run_dir)):
                    mirror.fetch(copy, run_dir)
                return warnings
            except (CheckpointError, FileNotFoundError) as error:
                warnings.append(f"copy in the mirror skipped: {copy.name}: {first_line(error)}")
    except ConfigError:
        raise
    except Exception as error:  # a file system's own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        said = f"{mirror.url} cannot be read ({type(error).__name__}: {first_line(error)})"
        if newest is None:
            raise UnreachableError(
                f"{said}, and {run_dir} has no checkpoint; try again, or start without --resume"
            ) from error
        return [f"{said}; the run continues from its own step {newest.step}"]
    if newest is None and warnings:
        raise CheckpointError(f"{mirror.url}: no sound checkpoint: {warnings[0]}")
    return warnings


def _is_left_behind(copy: Copy, events: list[Event]) -> bool:
    """Tell whether the run has gone back beyond a copy since, by the order of its log: clocks go back too."""
    attempt, is_behind = copy.recency[0], False
    for event in events:
        if event["event"] == "checkpoint":
            # Saved again after a rewind of the same start.
            is_behind &= (event["attempt"], event["step"]) != (attempt, copy.step)
        elif event["step"] < copy.step:
            is_same_start = event["event"] == "rewind" and event["attempt"] == attempt
            is_behind |= is_same_start or event["attempt"] > attempt
    return is_behind


def fetch_on_this_machine(start: Start) -> None:
    """Give another machine of the run the checkpoint that rank 0 chose, if its disk has none of that name.

    Raises: CheckpointError if the mirror does not have it.
    """
    url, chosen = start.config.checkpoint.checkpoint_mirror, start.checkpoint
    if url is None or chosen is None or chosen.path.exists():
        return
    mirror = connect(url, start.run_dir.name)
    wanted = copy_name(chosen.manifest)
    try:
        found = [copy for copy in mirror.in_time(mirror.list_copies)[0] if copy.name == wanted]
        if found:
            mirror.fetch(found[0], start.run_dir)
            return
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:
        if chosen.path.exists() and read_manifest(chosen.path) == chosen.manifest:
            return  # a shared disk, late
        raise UnreachableError(
            f"{mirror.url}: {type(error).__name__}: {first_line(error)}"
        ) from error
    raise CheckpointError(
        f"{chosen.path}: not on this machine's disk, and {mirror.url} has no copy of it; "
        f"use a shared --checkpoint_dir, or resume once on the machine that has it"
    )


def check_mirror(url: str, run_dir: Path, request: RunRequest) -> str | None:
    """Reject a mirror that cannot be one of this run; return a warning if it does not answer: training does not wait.

    Raises: ConfigError.
    """
    mirror = connect(url, run_dir.name)
    if mirror.is_at(run_dir):
        raise ConfigError(
            f"checkpoint_mirror {url}: holds the run itself, {run_dir}; choose a folder on another disk"
        )
    # A run that starts from the beginning owns none: it would delete the copies of its earlier checkpoints.
    is_resumed = request.resume is not None and catalog.has_checkpoints(run_dir)
    own = run_id(run_dir) if is_resumed else None
    try:
        mirror.in_time(lambda: mirror.require_own(own))
    except ConfigError as error:
        if is_resumed and own is None:
            raise ConfigError(
                f"{run_dir / METRICS}: has no first line, which tells a mirror the run; move {run_dir} away and "
                f"--resume latest --checkpoint_mirror {fmt.word_of_bash(url)} fetches the copies with their log, "
                f"or continue without the mirror: --checkpoint_mirror None"
            ) from error
        raise
    except Exception as error:
        return f"{mirror.url}: not reached ({type(error).__name__}: {first_line(error)})"
    return None


def catch_up_after_end(start: Start, signals: Signals, *, most: float) -> None:
    """Copy on rank 0 what the mirror of a complete run lacks, because its last start could not; say how far it is.

    It waits at most `most` seconds. What goes wrong is a warning: the run is complete.
    """
    try:
        with contextlib.closing(RunFolder(start.run_dir)):  # locked before anything is copied
            uploader = open_uploader(start)
            uploader.notify_saved()
            uploader.finish(wait_limit(signals, {}, most=most, has_failed=False))
            report, _ = uploader.take_report() or (None, [])
            path = start.run_dir / "status.json"
            status = history.read_json(path)
            if report is None or status is None:
                return
            if status.get("mirror") != asdict(report):
                status["mirror"] = asdict(report)
                replace_durably(path, json.dumps(status, indent=1) + "\n")
            print(describe_mirror(status))
    except (OSError, GPT2LabError) as error:
        print(f"warning: checkpoint mirror not updated: {first_line(error)}", file=sys.stderr)


def open_uploader(start: Start) -> Uploader:
    """Begin to copy what the mirror lacks."""
    config = start.config.checkpoint
    assert config.checkpoint_mirror is not None
    uploader = Uploader(
        # A folder that is gone since it was checked must not end a run; every save looks for it again.
        connect(config.checkpoint_mirror, start.run_dir.name, must_exist=False),
        start.run_dir,
        keep=config.keep_checkpoints,
        keep_emergency=config.keep_emergency_checkpoints,
    )
    if start.checkpoint is not None:  # the last start may have ended before its last copy arrived
        uploader.notify_saved()
    return uploader


def wait_limit(
    signals: Signals, deadlines: dict[str, float], *, most: float, has_failed: bool
) -> Callable[[], bool]:
    """Return a function that tells whether the end of a start may still wait for the last copy.

    After a signal or an error it may wait until shortly before the launcher kills. It never waits beyond a deadline or
    after a second signal.
    """
    began = time.monotonic()
    grace = (launcher_grace_seconds(os.environ) or _GRACE_SECONDS) - _MARGIN_SECONDS

    def may_wait() -> bool:
        now = time.monotonic()
        if signals.level >= 2 or any(now >= at for at in deadlines.values()):
            return False
        since = now - (began if signals.level == 0 else signals.asked_at)
        return since < (grace if signals.level or has_failed else min(most, WAIT_SECONDS))

    return may_wait
