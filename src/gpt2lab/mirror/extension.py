"""What `--checkpoint_mirror` adds to a run: it fetches what is newer, copies every checkpoint, and waits at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpt2lab import fmt
from gpt2lab.checkpoint import catalog
from gpt2lab.config.request import RunRequest
from gpt2lab.errors import FolderLostError
from gpt2lab.mirror.resume import (
    catch_up_after_end,
    check_mirror,
    fetch_newer,
    fetch_on_this_machine,
    find_mirrored,
    may_use,
    open_uploader,
    wait_limit,
)
from gpt2lab.mirror.upload import Uploader
from gpt2lab.training.extension import Extension, LiveRun
from gpt2lab.training.start import Start
from gpt2lab.training.stop import Signals

if TYPE_CHECKING:
    from gpt2lab.distributed.runtime import Runtime


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
            newest, _ = catalog.newest_valid(run_dir, set_aside=True)
            self._warnings = fetch_newer(url, run_dir, newest)
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
