"""The thread that copies checkpoints into a mirror: slow, failing, hanging and missing stores."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gpt2lab.checkpoint import catalog
from gpt2lab.mirror.storage import Mirror, connect
from gpt2lab.mirror.upload import MirrorReport, Uploader
from mirrors import WAIT, commit, new_run, steps


class Troubled(MemoryFileSystem):
    """A store that fails, or waits, where a test wants it to."""

    protocol = "troubled"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    trouble: ClassVar[Callable[[str], None]] = staticmethod(lambda path: None)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "wb":
            type(self).trouble(path)
        return super()._open(path, mode=mode, **kwargs)


@pytest.fixture
def troubled() -> Iterator[type[Troubled]]:
    fsspec.register_implementation("troubled", Troubled, clobber=True)
    Troubled.store.clear()
    Troubled.clear_instance_cache()
    yield Troubled
    Troubled.trouble = staticmethod(lambda path: None)


class Following:
    """An uploader and all that it has said."""

    def __init__(self, run_dir: Path, mirror: Mirror | None = None, **options: Any) -> None:
        self.mirror = mirror or connect("troubled://bucket", "run")
        how = {"keep": 10, "keep_emergency": 1, **options}
        self.uploader = Uploader(self.mirror, run_dir, **how)
        self.warnings: list[str] = []
        self.report: MirrorReport | None = None
        self._news = threading.Event()

    def save(self, step: int, **facts: Any) -> None:
        commit(self.uploader._run_dir, step, **facts)
        self.uploader.notify_saved()

    def until(self, condition: Callable[[MirrorReport], bool]) -> None:
        for _ in range(int(WAIT / 0.01)):
            if news := self.uploader.take_report():
                self.report = news[0]
                self.warnings += news[1]
            if self.report is not None and condition(self.report):
                return
            self._news.wait(0.01)
        pytest.fail(f"still {self.report}")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left"), PermissionError("Access Denied"), ValueError("odd")],
)
def test_a_store_that_fails_is_one_warning_and_is_tried_with_the_next_save(
    error, troubled, run_dir
):
    troubled.trouble = Mock(side_effect=error)
    follow = Following(run_dir)
    for step in (1, 2):
        follow.save(step)
        follow.until(lambda report, step=step: report.newest == step and report.error is not None)
    assert len(follow.warnings) == 1
    assert type(error).__name__ in follow.warnings[0]
    assert follow.report.step is None
    troubled.trouble = staticmethod(lambda path: None)
    follow.save(3)
    follow.until(lambda report: report.step == 3 and report.error is None)
    assert steps(follow.mirror) == [3], "the older ones are not caught up with"
    assert len(follow.warnings) == 1


def test_a_slow_store_is_skipped_to_the_newest_and_labels_follow(troubled, run_dir):
    reached, free = threading.Event(), threading.Event()

    def wait(path: str) -> None:
        if "step_00000001" in path:
            reached.set()
            free.wait(WAIT)

    troubled.trouble = staticmethod(wait)
    follow = Following(run_dir)
    follow.save(1)
    assert reached.wait(WAIT)
    for step in (2, 3, 4):
        commit(run_dir, step)
        if step == 2:
            catalog.set_label(run_dir, "best", 2)
        follow.uploader.notify_saved()  # returns although the store does not
    # Retired meanwhile: the open files are read to their end.
    shutil.rmtree(run_dir / "step_00000001")
    free.set()
    follow.until(lambda report: report.step == 4)
    follow.uploader.finish(lambda: True)
    assert (sorted(steps(follow.mirror)), follow.warnings) == ([1, 2, 4], [])


def test_a_store_that_hangs_is_given_up_and_another_thread_goes_on(troubled, run_dir):
    reached, free = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        if not reached.is_set():
            reached.set()
            free.wait(WAIT)

    troubled.trouble = staticmethod(hang)
    follow = Following(run_dir, stall_seconds=0.0)
    follow.save(1)
    assert reached.wait(WAIT)
    hung = follow.uploader._thread
    follow.save(2)
    follow.until(lambda report: report.step == 2)
    assert len(follow.warnings) == 1
    assert "no byte moved" in follow.warnings[0]
    free.set()
    hung.join(WAIT)
    assert not hung.is_alive()
    assert steps(follow.mirror) == [2], "the thread that was given up completes nothing"


def test_the_end_waits_as_long_as_it_may(troubled, run_dir):
    free, asked = threading.Event(), []
    troubled.trouble = staticmethod(lambda path: free.wait(WAIT) and None)
    follow = Following(run_dir)
    follow.save(1)

    def may_wait() -> bool:
        asked.append(1)
        return len(asked) < 3

    follow.uploader.finish(may_wait)
    free.set()
    assert len(asked) == 3
    follow.until(lambda report: "ended before" in str(report.error))
    again = Following(run_dir)
    again.uploader.notify_saved()
    again.uploader.finish(lambda: True)
    assert steps(again.mirror) == [1]


def test_the_last_copy_is_tried_once_more_at_the_end(troubled, run_dir):
    troubled.trouble = Mock(side_effect=OSError("gone for a moment"))
    follow = Following(run_dir)
    follow.save(1)
    follow.until(lambda report: report.error is not None)
    troubled.trouble = staticmethod(lambda path: None)
    follow.uploader.finish(lambda: True)
    assert steps(follow.mirror) == [1]


def test_a_newest_checkpoint_that_seems_older_is_copied_once_and_stays(troubled, run_dir):
    """As written by a version that took the time from the clock, which somebody put back."""
    uploads: list[str] = []

    def count(path: str) -> None:
        uploads.extend([path] if "step_00000004" in path and path.endswith("manifest.json") else [])

    troubled.trouble = staticmethod(count)
    follow = Following(run_dir, keep=3)
    for step, created in ((1, 1001.0), (2, 1002.0), (3, 1003.0), (4, 4.0)):
        commit(run_dir, step, created=created)
        catalog.retain(run_dir, keep=3, keep_emergency=1)
        follow.uploader.notify_saved()
        follow.until(lambda report, step=step: report.newest == step and len(uploads) > step - 4)
    follow.uploader.finish(lambda: len(uploads) < 3)
    assert (len(uploads), sorted(steps(follow.mirror))) == (1, [1, 2, 3, 4])


@pytest.mark.parametrize("what", ["moved", "replaced", "unreadable"])
def test_copies_stay_when_the_labels_cannot_be_known(what, troubled, run_dir, monkeypatch):
    def change(path: str) -> None:
        if "step_00000003" not in path or not path.endswith("manifest.json"):
            return
        if what == "unreadable":
            fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
            monkeypatch.setattr(catalog, "read_regular", fail)
            return
        os.rename(run_dir, run_dir.with_name("moved"))
        if what == "replaced":
            new_run(run_dir)

    follow = Following(run_dir, keep=1)
    for step in (1, 2, 3):
        commit(run_dir, step)
        if step == 1:
            catalog.set_label(run_dir, "best", 1)
        if step == 3:
            troubled.trouble = staticmethod(change)
        follow.uploader.notify_saved()
        if step < 3:
            follow.until(lambda report, step=step: report.step == step)
    follow.uploader.finish(lambda: True)
    assert sorted(steps(follow.mirror)) == [1, 2, 3]


def test_a_folder_missing_at_first_is_a_warning_and_is_used_by_a_later_save(run_dir, tmp_path):
    bucket = tmp_path / "mounted later"
    mirror = connect(f"file://{bucket}", "run", must_exist=False)
    follow = Following(run_dir, mirror)
    follow.save(1)
    follow.until(lambda report: report.error is not None)
    assert "create it" in follow.warnings[0]
    assert not bucket.exists()
    bucket.mkdir()
    follow.save(2)
    follow.until(lambda report: report.step == 2 and report.error is None)
