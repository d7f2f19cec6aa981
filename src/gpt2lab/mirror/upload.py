"""The thread that brings a mirror up to date with a run's folder. Training neither waits for it nor ends by it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.errors import first_line
from gpt2lab.mirror.storage import Mirror, copy_name

STALL_SECONDS = 120.0  # no byte until the next save: the thread is given up, another takes over
_MOST_STALLED = 10  # threads of one start; then the store is left alone until the next start


class _GivenUpError(Exception):
    """Another thread has taken this one's place."""


@dataclass(frozen=True)
class MirrorReport:
    """How far the mirror is: what status.json says of it."""

    url: str
    step: int | None  # of the newest complete copy
    newest: int | None  # of the newest checkpoint of the run
    error: str | None  # of the last try; None if it worked


class Uploader:
    """Copies the newest checkpoint, then those with labels, after every save; a failure waits for the next save."""

    def __init__(
        self,
        mirror: Mirror,
        run_dir: Path,
        *,
        keep: int,
        keep_emergency: int,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._mirror, self._run_dir = mirror, run_dir
        self._place = _place_of(run_dir)
        self._keep, self._keep_emergency = keep, keep_emergency
        self._stall_seconds = stall_seconds
        self._changed = threading.Condition()
        self._asked = self._done = 0  # saves that were announced, and dealt with
        self._moved = time.monotonic()  # when a byte moved last
        self._report = MirrorReport(mirror.url, None, None, None)
        self._stalled = 0
        self._warned_kinds: set[str] = set()  # of errors
        self._warnings: list[str] = []
        self._is_news = False
        self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread: threading.Thread | None = thread
        thread.start()

    def notify_saved(self) -> None:
        """Say that a checkpoint was committed; returns at once."""
        with self._changed:
            seconds = self._seconds_without_progress()
            if self._asked > self._done and seconds >= self._stall_seconds:
                problem = TimeoutError(f"no byte moved for {seconds:.0f} s; tried again")
                self._fail(problem)
                self._stalled += 1
                if self._stalled <= _MOST_STALLED:
                    self._start()
                self._moved = time.monotonic()
            if self._asked == self._done:
                self._moved = time.monotonic()
            self._asked += 1
            self._changed.notify_all()

    def take_report(self) -> tuple[MirrorReport, list[str]] | None:
        """Return the state and the warnings since the last call, None if nothing has changed."""
        with self._changed:
            if not self._is_news:
                return None
            warnings, self._warnings, self._is_news = self._warnings, [], False
            return self._report, warnings

    def finish(self, may_wait: Callable[[], bool]) -> None:
        """Wait until the newest checkpoint is copied or has failed, as long as `may_wait()` is true.

        Then end the thread.
        """
        if self._report.error is not None:
            self.notify_saved()
        with self._changed:
            while (
                self._asked > self._done
                and may_wait()
                and self._seconds_without_progress() < self._stall_seconds
            ):
                self._changed.wait(0.05)
            if self._asked > self._done:
                self._fail(TimeoutError("the process ended before the copy was complete"))
            self._thread = None  # whoever copies still is given up
            self._changed.notify_all()

    def _seconds_without_progress(self) -> float:
        return time.monotonic() - self._moved

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._is_given_up())
                if self._is_given_up():
                    return
                asked = self._asked
            error: Exception | None = None
            try:
                self._bring_up_to_date()
            except _GivenUpError:
                return
            except Exception as problem:  # of any kind: a file system's own, the network's, ours
                error = problem
            with self._changed:
                if self._is_given_up():
                    return
                self._done = asked
                if error is not None:
                    self._fail(error)
                self._changed.notify_all()

    def _is_given_up(self) -> bool:
        return threading.current_thread() is not self._thread

    def _tick(self) -> None:
        if self._is_given_up():
            raise _GivenUpError
        self._moved = time.monotonic()

    def _bring_up_to_date(self) -> None:
        uploaded: set[str] = set()
        while (info := self._next()) is not None:
            name = copy_name(info.manifest)
            if name in uploaded:
                raise OSError(f"{name}: copied, and not to be found there")
            try:
                self._mirror.upload(info.path, info.manifest, self._tick)
            except FileNotFoundError:
                if info.path.is_dir():
                    raise
                continue  # retired meanwhile: there is a newer one
            uploaded.add(name)
            self._tick()
            labels = self._labels()
            if labels is not None:
                self._mirror.retire(
                    labels, keep=self._keep, keep_emergency=self._keep_emergency, uploaded=uploaded
                )

    def _labels(self) -> dict[str, str] | None:
        """Return the labels of the run; None if they cannot be known, since copies without one are deleted."""
        try:
            labels = catalog.read_labels(self._run_dir, strict=True)
        except OSError:
            return None
        # Asked after they were read: those of a folder that is gone seem to be none.
        is_there = self._place is not None and _place_of(self._run_dir) == self._place
        return labels if is_there else None

    def _next(self) -> CheckpointInfo | None:
        """Return what to copy next: the newest checkpoint, then those with labels; None if all are there."""
        infos, _ = catalog.list_checkpoints(self._run_dir)
        with self._changed:
            self._report = replace(self._report, newest=infos[-1].step if infos else None)
        copies, _ = self._mirror.list_copies()
        self._tick()
        there = {copy.name for copy in copies}
        has_newest = bool(infos) and copy_name(infos[-1].manifest) in there
        with self._changed:
            before = self._report
            error = before.error if not has_newest else None
            step = copies[0].step if copies else None
            self._report = replace(before, step=step, error=error)
            self._is_news = True
        wanted = [*infos[-1:], *(info for info in infos[-2::-1] if catalog.is_labelled(info))]
        return next((info for info in wanted if copy_name(info.manifest) not in there), None)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            said, kind = first_line(error), type(error).__name__
            self._report = replace(self._report, error=f"{kind}: {said}")
            self._is_news = True
            if kind not in self._warned_kinds:
                self._warned_kinds.add(kind)
                self._warnings.append(
                    f"{self._report.url}: checkpoint not copied ({kind}: {said}); training goes on, "
                    f"the next save or start tries again"
                )


def _place_of(folder: Path) -> tuple[int, int] | None:
    """Return what tells a folder from another that has its name; None if it cannot be known."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino
