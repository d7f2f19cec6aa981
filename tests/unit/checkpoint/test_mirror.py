"""Copies of checkpoints in object storage: what is complete, what is kept, what is fetched, and what goes wrong."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.checkpoint.mirror import Mirror, connect, copy_name, describe_status
from gpt2lab.checkpoint.mirror_upload import Report, Uploader
from gpt2lab.errors import CheckpointError, ConfigError

FACTS: dict[str, Any] = {
    "run": "run",
    "tokens": 1,
    "config": {},
    "data_fingerprint": "f",
    "environment": {"world_size": 1},
}
FIRST_LINE = '{"event": "begin", "time": 1.0, "attempt": 1, "step": 0}\n'
WAIT = 60.0  # seconds until a test that hangs fails


def new_run(folder: Path, first_line: str = FIRST_LINE) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(first_line)
    return folder


def commit(
    run_dir: Path,
    step: int,
    *,
    kind: str = "rolling",
    attempt: int = 1,
    created: float | None = None,
) -> Path:
    """Commit a checkpoint of random bytes, some of them above one block of a copy."""
    with manifest.staged(run_dir, step) as staging:
        staging.add("model.safetensors", os.urandom(5 * 2**20 if step == 1 else 1000))
        staging.add("state.json", b"{}")
        staging.seal(
            {
                **FACTS,
                "step": step,
                "kind": kind,
                "created": float(step) if created is None else created,
                "attempt": attempt,
            }
        )
    with open(run_dir / "metrics.jsonl", "a") as log:
        log.write(json.dumps({"event": "checkpoint", "step": step}) + "\n")
    return run_dir / manifest.folder_name(step)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def steps(mirror: Mirror) -> list[int]:
    return [copy.step for copy in mirror.list_copies()[0]]


def copy_to(mirror: Mirror, *folders: Path) -> None:
    for folder in folders:
        mirror.upload(folder, manifest.read_manifest(folder))


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path / 'bucket'}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return new_run(tmp_path / "runs" / "run")


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Return the run's folder on a machine that has nothing of it."""
    return tmp_path / "elsewhere" / "run"


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_comes_back_with_every_byte_its_labels_and_its_log(
    url: str, run_dir: Path, fresh: Path
) -> None:
    mirror = connect(url, "run")
    assert mirror.list_copies() == ([], [])
    first, second = commit(run_dir, 1), commit(run_dir, 2)
    catalog.set_label(run_dir, "best", 1)
    (run_dir / "estimate.json").write_text('{"seconds": 3}')
    copy_to(mirror, first, second)
    newest, older = connect(url, "run").list_copies()[0]
    for copy, source in ((newest, second), (older, first)):
        assert contents(mirror.fetch(copy, fresh)) == contents(source)
    assert catalog.read_labels(fresh) == {"best": "step_00000001"}
    for name in ("metrics.jsonl", "estimate.json"):
        assert (fresh / name).read_bytes() == (run_dir / name).read_bytes()
    assert not list(fresh.glob(".tmp-*"))


def test_a_copy_without_its_manifest_is_none_and_is_done_again(url: str, run_dir: Path) -> None:
    mirror, folder = connect(url, "run"), commit(run_dir, 1)
    copy_to(mirror, folder)
    place = f"{mirror._root}/{copy_name(manifest.read_manifest(folder))}"
    mirror.fs.rm_file(f"{place}/manifest.json")
    assert steps(connect(url, "run")) == []
    copy_to(mirror, folder)
    assert steps(connect(url, "run")) == [1]


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json", "of_run.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_copy_is_never_fetched(
    file: str, damage: str, run_dir: Path, fresh: Path, tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path / 'bucket'}"
    mirror, folder = connect(url, "run"), commit(run_dir, 2)
    copy_to(mirror, folder)
    (copy,) = mirror.list_copies()[0]
    path = tmp_path / "bucket" / "run" / copy.name / file
    data = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes(data[:-1] if damage == "cut" else b"\xff" + data[1:])
    fresh.mkdir(parents=True)
    with pytest.raises((CheckpointError, FileNotFoundError)):
        mirror.fetch(copy, fresh)
    assert list(fresh.iterdir()) == []
    found, problems = connect(url, "run").list_copies()
    if file == "manifest.json":
        assert (found, len(problems)) == ([], int(damage != "remove"))


def test_a_damaged_log_in_a_copy_is_found(run_dir: Path, fresh: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    mirror, folder = connect(f"file://{tmp_path / 'bucket'}", "run"), commit(run_dir, 2)
    copy_to(mirror, folder)
    (copy,) = mirror.list_copies()[0]
    path = tmp_path / "bucket" / "run" / copy.name / "metrics.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl\.gz: damaged"):
        mirror.fetch(copy, fresh)
    assert not (fresh / "metrics.jsonl").exists()


def test_a_checkpoint_that_is_damaged_here_is_not_completed_there(url: str, run_dir: Path) -> None:
    mirror, folder = connect(url, "run"), commit(run_dir, 2)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[7] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged, not copied"):
        copy_to(mirror, folder)
    assert steps(connect(url, "run")) == []


def test_a_log_here_that_goes_on_is_kept_and_another_is_set_aside(
    url: str, run_dir: Path, fresh: Path
) -> None:
    mirror, folder = connect(url, "run"), commit(run_dir, 2)
    copy_to(mirror, folder)
    (copy,) = mirror.list_copies()[0]
    copied = (run_dir / "metrics.jsonl").read_text()
    for log, kept, aside in (
        (copied + '{"event": "stop"}\n', True, 0),
        (FIRST_LINE, False, 0),
        (FIRST_LINE + "{}\n", False, 1),
    ):
        shutil.rmtree(fresh, ignore_errors=True)
        new_run(fresh, log)
        mirror.fetch(copy, fresh)
        assert (fresh / "metrics.jsonl").read_text() == (log if kept else copied)
        assert [path.read_text() for path in fresh.glob("*.replaced-*")] == [log] * aside


@pytest.mark.parametrize("labels", [{"../best": "step_00000002"}, {"best": "../../etc"}, []])
def test_a_forged_label_leaves_nothing(
    labels: Any, run_dir: Path, fresh: Path, tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    mirror, folder = connect(f"file://{tmp_path / 'bucket'}", "run"), commit(run_dir, 2)
    copy_to(mirror, folder)
    (copy,) = mirror.list_copies()[0]
    path = tmp_path / "bucket" / "run" / copy.name / "of_run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "labels": labels}))
    with pytest.raises(CheckpointError, match="label"):
        mirror.fetch(copy, fresh)
    assert list(fresh.iterdir()) == []


class BufferedFile(AbstractBufferedFile):
    """A file that is sent in parts and is there when all of them are, as in S3."""

    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.pipe_file(self.path, self.parts)


class Buffered(MemoryFileSystem):
    """A store that behaves like S3 when a file is written."""

    protocol = "buffered"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "wb" and "data" not in kwargs:
            return BufferedFile(self, path, mode, 100, autocommit=kwargs["autocommit"])
        return super()._open(path, mode=mode, **kwargs)


class GivenUpError(Exception):
    """What an uploader's tick raises in a thread whose place another one has taken."""


@pytest.mark.parametrize("protocol", ["file", "buffered"])
def test_an_upload_given_up_anywhere_leaves_a_complete_copy_as_it_is(
    protocol: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2lab.checkpoint.mirror._BLOCK", 400)
    fsspec.register_implementation("buffered", Buffered, clobber=True)
    Buffered.store.clear()
    (tmp_path / "bucket").mkdir()
    mirror, folder = connect(f"{protocol}://{tmp_path / 'bucket'}", "run"), commit(run_dir, 2)
    with open(run_dir / "metrics.jsonl", "a") as log:
        log.write(os.urandom(1000).hex() + "\n")  # longer than a block
    copy_to(mirror, folder)
    place = f"{mirror._root}/{mirror.list_copies()[0][0].name}"

    def there() -> dict[str, bytes]:
        return {path: mirror.fs.cat_file(path) for path in mirror.fs.ls(place, detail=False)}

    whole, is_given_up, last = there(), True, 0
    while is_given_up:
        left, last = iter(range(last)), last + 1

        def tick(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise GivenUpError

        try:
            mirror.upload(folder, manifest.read_manifest(folder), tick)
            is_given_up = False
        except GivenUpError:
            assert there() == whole
    assert there() == whole
    assert last > len(whole)
    assert not mirror.fs.transaction.files, "nothing is kept in memory"


def test_a_copy_in_a_folder_is_on_its_disk_before_its_manifest_has_a_name(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is flushed before its rename, and the folder after it, so that a power cut takes the last ones."""
    (tmp_path / "bucket").mkdir()
    mirror, folder = connect(f"file://{tmp_path / 'bucket'}", "run"), commit(run_dir, 2)
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.replace

    def note_flush(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        done.append(("flush", name[1:-9] if name.startswith(".") else name))
        fsync(descriptor)

    def note_rename(old: Path, new: str) -> None:
        done.append(("rename", Path(new).name))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", note_rename)
    copy_to(mirror, folder)
    place = ("flush", copy_name(manifest.read_manifest(folder)))
    names = ["of_run.json", "metrics.jsonl.gz", "model.safetensors", "state.json", "manifest.json"]
    last = done.index(("rename", "of_run.json")) - 1
    for name in names:
        assert done.index(("flush", name)) < done.index(("rename", name))
        assert last < done.index(("rename", name))
        last = done.index(place, done.index(("rename", name)))
    assert done.index(("flush", "run")) < done.index(("rename", "manifest.json"))
    assert done.index(("flush", "bucket")) < done.index(("rename", "manifest.json"))


# -- whose copies ----------------------------------------------------------------------------------------------------


def test_two_runs_of_one_name_do_not_mix(url: str, run_dir: Path, tmp_path: Path) -> None:
    other = new_run(tmp_path / "other" / "run", FIRST_LINE.replace("1.0", "2.0"))
    mirror = connect(url, "run")
    copy_to(mirror, commit(run_dir, 1))
    with pytest.raises(ConfigError, match="another run of this name"):
        copy_to(mirror, commit(other, 2))
    with pytest.raises(ConfigError, match="another run of this name"):
        mirror.require_own(None)
    assert steps(connect(url, "run")) == [1]


def test_a_run_that_died_before_its_first_copy_is_replaced(
    url: str, run_dir: Path, tmp_path: Path
) -> None:
    other = new_run(tmp_path / "other" / "run", FIRST_LINE.replace("1.0", "2.0"))
    mirror = connect(url, "run")
    mirror._claim(run_dir)
    copy_to(mirror, commit(other, 2))
    assert steps(mirror) == [2]


@pytest.mark.parametrize(
    ("text", "is_claimed"), [("", True), ('{"format": "gpt2la', True), ('{"format": "x/2"}', False)]
)
def test_a_torn_owner_is_written_again_and_another_formats_is_left(
    text: str, is_claimed: bool, run_dir: Path, tmp_path: Path
) -> None:
    place = tmp_path / "bucket" / "run"
    place.mkdir(parents=True)
    (place / "mirror.json").write_text(text)
    mirror, folder = connect(f"file://{tmp_path / 'bucket'}", "run"), commit(run_dir, 1)
    if is_claimed:
        copy_to(mirror, folder)
        assert steps(mirror) == [1]
    else:
        with pytest.raises(ConfigError, match="holds other files"):
            copy_to(mirror, folder)
        assert (place / "mirror.json").read_text() == text


def test_files_of_others_are_neither_claimed_nor_deleted(run_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "bucket" / "run"
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    mirror = connect(f"file://{tmp_path / 'bucket'}", "run")
    with pytest.raises(ConfigError, match="holds other files"):
        copy_to(mirror, commit(run_dir, 1))
    assert [path.name for path in place.iterdir()] == ["thesis.tex"]


def test_copies_are_retired_by_the_rules_of_the_run_and_nothing_else_is(
    run_dir: Path, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket" / "run"
    bucket.parent.mkdir()
    mirror = connect(f"file://{bucket.parent}", "run")
    copy_to(mirror, *(commit(run_dir, step) for step in range(1, 7)))
    catalog.set_label(run_dir, "best", 2)
    torn = next(bucket.glob("step_00000001-*"))
    (torn / "manifest.json").unlink()
    (bucket / "mine.txt").write_text("mine")
    (bucket / "step_00000003-abcdabcd").mkdir()  # named like ours, and without our list
    (bucket / "step_00000003-abcdabcd" / "mine.txt").write_text("mine")
    third = next(path for path in bucket.glob("step_00000003-*") if (path / "of_run.json").exists())
    (third / "mine.txt").write_text("mine")
    mirror = connect(f"file://{bucket.parent}", "run")
    mirror.retire(catalog.read_labels(run_dir), keep=2, keep_emergency=1)
    assert steps(connect(f"file://{bucket.parent}", "run")) == [6, 5, 2]
    assert not torn.exists()
    assert len(list(bucket.rglob("mine.txt"))) == 3
    mirror.retire({}, keep=1, keep_emergency=1)
    assert steps(mirror) == [6, 5], "one more than the newest, which was not read again"


# -- the URL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/mnt/copies", "not a plain URL"),
        ("s3://user:secret@bucket/x", "without user, password"),
        ("simplecache::s3://bucket", "not a plain URL"),
        ("nonesuch://bucket/x", "[Pp]rotocol not known"),
        ("file://relative/path", "absolute path"),
        ("file:///no/such/folder", "no such folder"),
        ("memory://", "not a plain URL"),
        ("memory:///", "name a bucket or folder"),
    ],
)
def test_a_url_that_cannot_be_a_mirrors_is_one_line(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        connect(url, "run")
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsspec.core", "s3fs"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ConfigError, match=r"extra `mirror` .*pip install fsspec s3fs"):
                connect("s3://bucket/path", "run")


# -- the thread ------------------------------------------------------------------------------------------------------


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
        self.uploader = Uploader(
            self.mirror, run_dir, **{"keep": 10, "keep_emergency": 1, **options}
        )
        self.warnings: list[str] = []
        self.report: Report | None = None
        self._news = threading.Event()

    def until(self, condition: Callable[[Report], bool]) -> None:
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
def test_a_store_that_fails_is_one_warning_and_is_tried_again_with_the_next_save(
    error: Exception, troubled: type[Troubled], run_dir: Path
) -> None:
    def fail(path: str) -> None:
        raise error

    troubled.trouble = staticmethod(fail)
    follow = Following(run_dir)
    for step in (1, 2):
        commit(run_dir, step)
        follow.uploader.notify_saved()
        follow.until(lambda report, step=step: report.newest == step and report.error is not None)
    assert len(follow.warnings) == 1
    assert type(error).__name__ in follow.warnings[0]
    assert follow.report is not None
    assert follow.report.step is None
    troubled.trouble = staticmethod(lambda path: None)
    commit(run_dir, 3)
    follow.uploader.notify_saved()
    follow.until(lambda report: report.step == 3 and report.error is None)
    assert steps(follow.mirror) == [3], "the older ones are not caught up with"
    assert len(follow.warnings) == 1


def test_a_slow_store_is_skipped_to_the_newest_and_labels_follow(
    troubled: type[Troubled], run_dir: Path
) -> None:
    reached, free = threading.Event(), threading.Event()

    def wait(path: str) -> None:
        if "step_00000001" in path:
            reached.set()
            free.wait(WAIT)

    troubled.trouble = staticmethod(wait)
    follow = Following(run_dir)
    commit(run_dir, 1)
    follow.uploader.notify_saved()
    assert reached.wait(WAIT)
    for step in (2, 3, 4):
        commit(run_dir, step)
        if step == 2:
            catalog.set_label(run_dir, "best", 2)
        follow.uploader.notify_saved()  # returns although the store does not
    shutil.rmtree(
        run_dir / "step_00000001"
    )  # retired meanwhile: the open files are read to their end
    free.set()
    follow.until(lambda report: report.step == 4)
    follow.uploader.finish(lambda: True)
    assert sorted(steps(follow.mirror)) == [1, 2, 4]
    assert follow.warnings == []


def test_a_store_that_hangs_is_given_up_and_another_thread_goes_on(
    troubled: type[Troubled], run_dir: Path
) -> None:
    reached, free = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        if not reached.is_set():
            reached.set()
            free.wait(WAIT)

    troubled.trouble = staticmethod(hang)
    follow = Following(run_dir, stall_seconds=0.0)
    commit(run_dir, 1)
    follow.uploader.notify_saved()
    assert reached.wait(WAIT)
    hung = follow.uploader._thread
    assert hung is not None
    commit(run_dir, 2)
    follow.uploader.notify_saved()
    follow.until(lambda report: report.step == 2)
    assert len(follow.warnings) == 1
    assert "no byte moved" in follow.warnings[0]
    free.set()
    hung.join(WAIT)
    assert not hung.is_alive()
    assert steps(follow.mirror) == [2], "the thread that was given up completes nothing"


def test_the_end_waits_as_long_as_it_may(troubled: type[Troubled], run_dir: Path) -> None:
    free, asked = threading.Event(), []
    troubled.trouble = staticmethod(lambda path: free.wait(WAIT) and None)
    follow = Following(run_dir)
    commit(run_dir, 1)
    follow.uploader.notify_saved()

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


def test_the_last_copy_is_tried_once_more_at_the_end(
    troubled: type[Troubled], run_dir: Path
) -> None:
    def fail(path: str) -> None:
        raise OSError("gone for a moment")

    troubled.trouble = staticmethod(fail)
    follow = Following(run_dir)
    commit(run_dir, 1)
    follow.uploader.notify_saved()
    follow.until(lambda report: report.error is not None)
    troubled.trouble = staticmethod(lambda path: None)
    follow.uploader.finish(lambda: True)
    assert steps(follow.mirror) == [1]


def test_a_newest_checkpoint_that_seems_older_is_copied_once_and_stays(
    troubled: type[Troubled], run_dir: Path
) -> None:
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
    assert len(uploads) == 1
    assert sorted(steps(follow.mirror)) == [1, 2, 3, 4]


@pytest.mark.parametrize("what", ["moved", "replaced", "unreadable"])
def test_copies_stay_when_the_labels_cannot_be_known(
    what: str, troubled: type[Troubled], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(path: str) -> None:
        if "step_00000003" not in path or not path.endswith("manifest.json"):
            return
        if what == "unreadable":
            monkeypatch.setattr(catalog, "read_regular", fail)
            return
        os.rename(run_dir, run_dir.with_name("moved"))
        if what == "replaced":
            new_run(run_dir)

    def fail(path: Path, *, at_most: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

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


def test_a_folder_that_is_missing_at_first_is_a_warning_and_is_used_with_a_later_save(
    run_dir: Path, tmp_path: Path
) -> None:
    bucket = tmp_path / "mounted later"
    mirror = connect(f"file://{bucket}", "run", must_exist=False)
    follow = Following(run_dir, mirror)
    commit(run_dir, 1)
    follow.uploader.notify_saved()
    follow.until(lambda report: report.error is not None)
    assert "create it" in follow.warnings[0]
    assert not bucket.exists()
    bucket.mkdir()
    commit(run_dir, 2)
    follow.uploader.notify_saved()
    follow.until(lambda report: report.step == 2 and report.error is None)


# -- killed ----------------------------------------------------------------------------------------------------------

_PROGRAM = """
import sys
from pathlib import Path
from gpt2lab.checkpoint import manifest
from gpt2lab.checkpoint.mirror import connect
verb, url, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
mirror = connect(url, "run")
if verb == "upload":
    mirror.upload(folder, manifest.read_manifest(folder))
else:
    mirror.fetch(mirror.list_copies()[0][0], folder)
"""


def run_killed(verb: str, url: str, folder: Path, fault: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, verb, url, str(folder)],
        env={**os.environ, "FAULT": f"{fault}:kill9@1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr


def test_what_a_killed_upload_left_is_deleted_with_its_copy(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path / 'bucket'}"
    run_killed("upload", url, commit(run_dir, 1), "mirror.upload.model.safetensors")
    mirror = connect(url, "run")
    copy_to(mirror, commit(run_dir, 2))
    mirror.retire({}, keep=1, keep_emergency=1)
    assert [path.name[:13] for path in (tmp_path / "bucket" / "run").glob("step_*")] == [
        "step_00000002"
    ]


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_killed_in_the_middle_of_an_upload_leaves_no_copy(
    file: str, run_dir: Path, fresh: Path, tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    url, folder = f"file://{tmp_path / 'bucket'}", commit(run_dir, 1)
    run_killed("upload", url, folder, f"mirror.upload.{file}")
    mirror = connect(url, "run")
    assert steps(mirror) == []
    copy_to(mirror, folder)
    assert contents(mirror.fetch(mirror.list_copies()[0][0], fresh)) == contents(folder)


@pytest.mark.parametrize(
    "point", ["download.model.safetensors", "download.manifest.json", "before_rename"]
)
def test_killed_in_the_middle_of_a_download_leaves_nothing_like_a_checkpoint(
    point: str, run_dir: Path, fresh: Path, tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    url, folder = f"file://{tmp_path / 'bucket'}", commit(run_dir, 1)
    mirror = connect(url, "run")
    copy_to(mirror, folder)
    run_killed("fetch", url, fresh, f"mirror.{point}")
    assert catalog.list_checkpoints(fresh) == ([], [])
    assert list(fresh.glob(".tmp-mirror-*"))
    catalog.sweep(fresh)
    assert not list(fresh.glob(".tmp-mirror-*"))
    assert contents(mirror.fetch(mirror.list_copies()[0][0], fresh)) == contents(folder)


# -- what people see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, None),
        ({"mirror": "odd"}, None),
        ({"mirror": {"newest": "odd"}}, "mirror: no copy yet"),
        (
            {"mirror": {"step": 40, "newest": 60, "error": None}},
            "mirror: newest copy is step 40, newest checkpoint is step 60",
        ),
        (
            {"mirror": {"step": None, "newest": 60, "error": "OSError: full"}},
            "mirror: no copy yet, newest checkpoint is step 60; last error OSError: full",
        ),
    ],
)
def test_status_says_how_far_the_mirror_is(status: dict[str, Any], line: str | None) -> None:
    assert describe_status(status) == line


def test_the_log_of_a_copy_is_plain_gzip(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    mirror = connect(f"file://{tmp_path / 'bucket'}", "run")
    copy_to(mirror, commit(run_dir, 1))
    (path,) = (tmp_path / "bucket").rglob("metrics.jsonl.gz")
    assert gzip.decompress(path.read_bytes()) == (run_dir / "metrics.jsonl").read_bytes()
