"""Copies of checkpoints in object storage: what is complete, what is kept, what is fetched, and what goes wrong."""

import gzip
import json
import os
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
import pytest
from fsspec.implementations.local import LocalFileOpener
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

import launch
from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.errors import CheckpointError, ConfigError, UnreachableError
from gpt2lab.mirror.extension import fetch_newer
from gpt2lab.mirror.storage import Copy, Mirror, connect, copy_name
from gpt2lab.runs.overview import describe_mirror
from mirrors import FIRST_LINE, WAIT, commit, contents, copy_to, new_run, steps
from tiny import edit_json, flip_bit


@pytest.fixture(params=["file", "memory"])
def url(request, bucket) -> str:
    return f"file://{bucket}" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def fresh(tmp_path) -> Path:
    """Return the run's folder on a machine that has nothing of it."""
    return tmp_path / "elsewhere" / "run"


class Copied(NamedTuple):
    """A checkpoint of step 2 and its copy in a folder."""

    mirror: Mirror
    folder: Path
    copy: Copy
    path: Path  # of the copy


@pytest.fixture
def copied(run_dir, bucket) -> Copied:
    mirror, folder = connect(f"file://{bucket}", "run"), commit(run_dir, 2)
    copy_to(mirror, folder)
    (copy,) = mirror.list_copies()[0]
    return Copied(mirror, folder, copy, bucket / "run" / copy.name)


def test_a_copy_comes_back_with_every_byte_its_labels_and_its_log(url, run_dir, fresh, monkeypatch):
    mirror = connect(url, "run")
    assert mirror.list_copies() == ([], [])
    first, second = commit(run_dir, 1), commit(run_dir, 2)
    catalog.set_label(run_dir, "best", 1)
    (run_dir / "estimate.json").write_text('{"seconds": 3}')
    copy_to(mirror, first, second)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # a job's own, which ended with the job
    newest, older = connect(url, "run").list_copies()[0]
    for copy, source in ((newest, second), (older, first)):
        assert contents(mirror.fetch(copy, fresh)) == contents(source)
    assert catalog.read_labels(fresh) == {"best": "step_00000001"}
    for name in ("metrics.jsonl", "estimate.json"):
        assert (fresh / name).read_bytes() == (run_dir / name).read_bytes()
    assert not list(fresh.glob(".tmp-*"))


@pytest.mark.parametrize(
    "file", ["model.safetensors", "manifest.json", "of_run.json", "metrics.jsonl.gz"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_copy_is_never_fetched(file, damage, copied, bucket, fresh):
    path = copied.path / file
    data = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes(data[:-1] if damage == "cut" else b"\xff" + data[1:])
    fresh.mkdir(parents=True)
    with pytest.raises((CheckpointError, FileNotFoundError)):
        copied.mirror.fetch(copied.copy, fresh)
    assert not [name for name in fresh.iterdir() if name.name != "metrics.jsonl"]
    found, problems = connect(f"file://{bucket}", "run").list_copies()
    if file == "manifest.json":
        assert (found, len(problems)) == ([], int(damage != "remove"))


@pytest.mark.parametrize(("mebibytes", "is_recorded"), [(1, True), (200, True), (200, False)])
def test_a_log_that_unpacks_to_something_else_is_never_kept(
    mebibytes, is_recorded, copied, run_dir, fresh
):
    """Copies of older versions record no size and hash; none of ours shrinks to a thousandth."""
    log = gzip.decompress((copied.path / "metrics.jsonl.gz").read_bytes())
    assert log == (run_dir / "metrics.jsonl").read_bytes()
    about = json.loads((copied.path / "of_run.json").read_text())
    with gzip.open(copied.path / "metrics.jsonl.gz", "wb") as file:
        file.writelines(bytes(1 << 20) for _ in range(mebibytes))
    recorded = about.pop("log") | {"bytes": mebibytes << 20}
    about |= {"log": recorded} if is_recorded else {}
    (copied.path / "of_run.json").write_text(json.dumps(about))
    fresh.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl\.gz"):
        copied.mirror.fetch(copied.copy, fresh)
    assert not list(fresh.iterdir())


def test_a_download_that_hangs_is_given_up(run_dir, fresh, monkeypatch, bucket):
    """As from a network disk that no longer answers: the weights' first block never comes."""
    free, read = threading.Event(), LocalFileOpener.read

    def wait(file: LocalFileOpener, length: int = -1) -> bytes:
        if file.path.endswith("model.safetensors"):
            free.wait(WAIT)
        return read(file, length)

    url = f"file://{bucket}"
    mirror, folder = connect(url, fresh.name), commit(run_dir, 2)
    copy_to(mirror, folder)
    monkeypatch.setattr(LocalFileOpener, "read", wait)
    monkeypatch.setattr("gpt2lab.mirror.storage.ANSWER_SECONDS", 0.2)
    with pytest.raises(
        UnreachableError, match=r"no answer in .*no checkpoint; try again, or start"
    ):
        fetch_newer(url, fresh, None, tell=print)
    free.set()
    assert [path.name for path in fresh.iterdir()] == ["run.lock"]


def test_a_checkpoint_that_is_damaged_here_is_not_completed_there(url, run_dir):
    mirror, folder = connect(url, "run"), commit(run_dir, 2)
    flip_bit(folder / "model.safetensors", 7)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged, not copied"):
        copy_to(mirror, folder)
    assert steps(connect(url, "run")) == []


def test_a_log_here_that_goes_on_is_kept_and_another_is_set_aside(url, run_dir, fresh):
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
def test_a_forged_label_leaves_nothing(labels, copied, fresh):
    edit_json(copied.path / "of_run.json", labels=labels)
    with pytest.raises(CheckpointError, match="label"):
        copied.mirror.fetch(copied.copy, fresh)
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
def test_an_upload_given_up_leaves_a_complete_copy_as_it_is(protocol, run_dir, monkeypatch, bucket):
    monkeypatch.setattr("gpt2lab.mirror.storage._BLOCK", 400)
    fsspec.register_implementation("buffered", Buffered, clobber=True)
    Buffered.store.clear()
    mirror, folder = connect(f"{protocol}://{bucket}", "run"), commit(run_dir, 2)
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


def test_a_copy_in_a_folder_is_on_disk_before_its_manifest_has_a_name(run_dir, listen, bucket):
    """Every file is flushed before its rename, and the folder after it, so that a power cut takes the last ones."""
    mirror, folder = connect(f"file://{bucket}", "run"), commit(run_dir, 2)
    calls = listen()
    copy_to(mirror, folder)
    names = ((what, path.name) for what, path in calls)
    done = [(what, name[1:-9] if name.startswith(".") else name) for what, name in names]
    place = ("fsync", copy_name(manifest.read_manifest(folder)))
    files = ["of_run.json", "metrics.jsonl.gz", "model.safetensors", "state.json", "manifest.json"]
    last = done.index(("replace", "of_run.json")) - 1
    for name in files:
        assert done.index(("fsync", name)) < done.index(("replace", name))
        assert last < done.index(("replace", name))
        last = done.index(place, done.index(("replace", name)))
    assert done.index(("fsync", "run")) < done.index(("replace", "manifest.json"))
    assert done.index(("fsync", "bucket")) < done.index(("replace", "manifest.json"))


def test_two_runs_of_one_name_do_not_mix(url, run_dir, tmp_path):
    """One that died before its first copy is replaced."""
    other = new_run(tmp_path / "other" / "run", FIRST_LINE.replace("1.0", "2.0"))
    third = new_run(tmp_path / "third" / "run", FIRST_LINE.replace("1.0", "3.0"))
    mirror = connect(url, "run")
    mirror._claim(third)
    copy_to(mirror, commit(run_dir, 1))
    with pytest.raises(ConfigError, match="another run of this name"):
        copy_to(mirror, commit(other, 2))
    with pytest.raises(ConfigError, match="another run of this name"):
        mirror.require_own(None)
    assert steps(connect(url, "run")) == [1]


@pytest.mark.parametrize(
    ("name", "text", "is_claimed"),
    [
        *(("mirror.json", "", True), ("mirror.json", '{"format": "gpt2la', True)),
        *(("mirror.json", '{"format": "x/2"}', False), ("thesis.tex", "years of work", False)),
    ],
)
def test_a_torn_owner_is_written_again_and_files_of_others_are_left(
    name, text, is_claimed, run_dir, bucket
):
    (bucket / "run").mkdir()
    (bucket / "run" / name).write_text(text)
    mirror, folder = connect(f"file://{bucket}", "run"), commit(run_dir, 1)
    if is_claimed:
        copy_to(mirror, folder)
        assert steps(mirror) == [1]
    else:
        with pytest.raises(ConfigError, match="holds other files"):
            copy_to(mirror, folder)
        assert contents(bucket / "run") == {name: text.encode()}


def test_copies_are_retired_by_the_runs_rules_and_nothing_else_is(run_dir, bucket, monkeypatch):
    url, bucket = f"file://{bucket}", bucket / "run"
    mirror = connect(url, "run")
    copy_to(mirror, *(commit(run_dir, step) for step in range(1, 7)))
    catalog.set_label(run_dir, "best", 2)
    torn = next(bucket.glob("step_00000001-*"))
    (torn / "manifest.json").unlink()
    (bucket / "mine.txt").write_text("mine")
    (bucket / "step_00000003-abcdabcd").mkdir()  # named like ours, and without our list
    (bucket / "step_00000003-abcdabcd" / "mine.txt").write_text("mine")
    third = next(path for path in bucket.glob("step_00000003-*") if (path / "of_run.json").exists())
    (third / "mine.txt").write_text("mine")
    mirror = connect(url, "run")
    deleted: list[tuple[str, str]] = []
    delete = mirror.fs.rm_file

    def note(path: str) -> None:
        deleted.append((Path(path).parent.name, Path(path).name))
        delete(path)

    monkeypatch.setattr(mirror.fs, "rm_file", note)
    mirror.retire(catalog.read_labels(run_dir), keep=2, keep_emergency=1)
    for copy in dict.fromkeys(copy for copy, _ in deleted):
        names = [name for of, name in deleted if of == copy]
        assert (names[0], names[-1]) == ("manifest.json", "of_run.json")
    assert steps(connect(url, "run")) == [6, 5, 2]
    assert not torn.exists()
    assert len(list(bucket.rglob("mine.txt"))) == 3
    mirror.retire({}, keep=1, keep_emergency=1)
    assert steps(mirror) == [6, 5], "one more than the newest, which was not read again"


@pytest.mark.parametrize(
    "url",
    [
        *("/mnt/copies", "s3://user:secret@bucket/x", "simplecache::s3://bucket", "memory://"),
        *("nonesuch://bucket/x", "file://relative/path", "file:///no/such/folder", "memory:///"),
    ],
)
def test_a_url_that_cannot_be_a_mirrors_is_one_line(url, wording):
    with pytest.raises(ConfigError, check=wording):
        connect(url, "run")


def test_a_missing_package_is_named(monkeypatch):
    for name in ("fsspec.core", "s3fs"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ConfigError, match=r"extra `mirror` .*pip install fsspec s3fs"):
                connect("s3://bucket/path", "run")


_PROGRAM = """
import sys
from pathlib import Path
from gpt2lab.checkpoint import manifest
from gpt2lab.mirror.storage import connect
verb, url, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
mirror = connect(url, "run")
if verb == "upload":
    mirror.upload(folder, manifest.read_manifest(folder))
else:
    mirror.fetch(mirror.list_copies()[0][0], folder)
"""


@pytest.mark.parametrize(
    "point",
    [
        *(f"upload.{name}" for name in ("model.safetensors", "state.json", "manifest.json")),
        *("download.model.safetensors", "download.manifest.json", "before_rename"),
    ],
)
def test_a_kill_in_a_copy_leaves_nothing_like_a_checkpoint(point, run_dir, fresh, bucket):
    url, folder, uploads = f"file://{bucket}", commit(run_dir, 1), point.startswith("upload")
    mirror = connect(url, "run")
    if not uploads:
        copy_to(mirror, folder)
    words = ("upload", url, folder) if uploads else ("fetch", url, fresh)
    done = launch.python("-c", _PROGRAM, *words, FAULT=f"mirror.{point}:kill9@1")
    assert done.returncode == -9, done.stderr
    if uploads:
        assert steps(mirror) == []
        copy_to(mirror, folder)
    else:
        assert catalog.list_checkpoints(fresh) == ([], [])
        assert list(fresh.glob(".tmp-mirror-*"))
        catalog.sweep(fresh)
        assert not list(fresh.glob(".tmp-mirror-*"))
    assert contents(mirror.fetch(mirror.list_copies()[0][0], fresh)) == contents(folder)


@pytest.mark.parametrize(
    "mirror",
    [
        *("odd", {"newest": "odd"}, {"step": 40, "newest": 60, "error": None}),
        {"step": None, "newest": 60, "error": "OSError: full"},
    ],
    ids=str,
)
def test_status_says_how_far_the_mirror_is(mirror, wording):
    wording(describe_mirror({"mirror": mirror}))
    assert describe_mirror({}) is None
