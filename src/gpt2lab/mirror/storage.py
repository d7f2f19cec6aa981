"""Copies of a run's checkpoints in object storage, written and read through fsspec. No torch.

    URL/<run>/mirror.json                  which run's copies these are
    URL/<run>/step_00000250-1a2b3c4d/      one copy; its name ends with the first digits of its manifest's hash
        of_run.json  metrics.jsonl.gz      what a new machine needs besides: labels, forecast, log
        model.safetensors ...              as in the run's folder
        manifest.json                      written last: a copy without it is not complete

A copy's name follows from its content, so that no complete copy is ever written over.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import re
import tempfile
import threading
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint import manifest as manifests
from gpt2lab.checkpoint.catalog import LABELS
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, folder_name, is_folder_name
from gpt2lab.errors import CheckpointError, ConfigError, first_line
from gpt2lab.files import (
    COUNT,
    HASH,
    OBJECT,
    STRING,
    TEXT,
    JsonFile,
    is_count,
    is_file_name,
    list_of,
    object_with,
    open_regular,
    or_null,
    read_regular,
    regular,
    replace_durably,
    staged_file,
    sweep_temporaries,
    sync_folder,
)
from gpt2lab.runs.events import METRICS

FORMAT = "gpt2lab-mirror/1"
_OWNER, _OF_RUN = "mirror.json", "of_run.json"
_METRICS, _FORECAST = "metrics.jsonl.gz", "estimate.json"
_COPY = re.compile(r"step_[0-9]{8,}-[0-9a-f]{8}")
_BLOCK = 4 * 1024 * 1024
_MOST_LOG = 1 << 36  # bytes of a log, 200 times a run of a million steps
ANSWER_SECONDS = 60.0  # for the answer to one question, or one block of a download
_BUCKETS = ("s3", "s3a", "gs", "gcs")  # protocols whose path begins with a bucket, which must exist
_LOCAL = ("file", "local")

Tick = Callable[[], None]  # called after every block; an error from it ends the copy
T = TypeVar("T")


@dataclass(frozen=True)
class Copy:
    """One complete copy of a checkpoint; its bytes are verified when it is fetched."""

    name: str
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return int(self.manifest["step"])

    @property
    def recency(self) -> tuple[int, float]:
        """A sort key, greater for newer copies: the start that wrote the checkpoint, then its time."""
        attempt = self.manifest.get("attempt", 1)
        return attempt if is_count(attempt) else 1, self.manifest["created"]


def copy_name(manifest: dict[str, Any]) -> str:
    """Name the copy of a checkpoint."""
    return f"{folder_name(manifest['step'])}-{manifest['manifest_sha256'][:8]}"


def run_id(run_dir: Path) -> str | None:
    """Return what tells a run from another of its name: the hash of its log's first line; None before there is one."""
    try:
        with open(run_dir / METRICS, "rb", opener=regular) as file:
            line = file.readline(1 << 20)
    except OSError:
        return None
    return hashlib.sha256(line).hexdigest() if line.endswith(b"\n") else None


def connect(url: str, run: str, *, must_exist: bool = True) -> Mirror:
    """Return the mirror of a run below a URL; nothing is read or written there yet.

    Without `must_exist` a folder of this machine may be missing now; the first use of it is an error then.

    Raises: ConfigError if the URL cannot be one of a mirror, or the package for it is missing.
    """
    protocol = url.partition("://")[0]
    if re.fullmatch(r"[a-z][a-z0-9+.-]*://[^@?#]+", url) is None or "::" in url:
        raise ConfigError(
            f"checkpoint_mirror {url!r}: not a plain URL; write s3://BUCKET/PATH, gs://BUCKET/PATH or "
            f"file:///FOLDER, without user, password or options; None is no mirror"
        )
    if protocol in _LOCAL and not url.startswith(f"{protocol}:///"):
        raise ConfigError(f"checkpoint_mirror {url}: needs an absolute path, {protocol}:///FOLDER")
    try:
        from fsspec.core import url_to_fs

        fs, base = url_to_fs(url)
    except ImportError as error:
        raise ConfigError(
            f"checkpoint_mirror {url}: a package is missing ({first_line(error)}); the extra `mirror` of "
            f"pyproject.toml names it: pip install fsspec s3fs (gs:// needs gcsfs)"
        ) from error
    except Exception as error:  # of any file system: an unknown protocol, bad settings of its own
        raise ConfigError(f"checkpoint_mirror {url}: {first_line(error)}") from error
    if not base.strip("/"):
        raise ConfigError(f"checkpoint_mirror {url}: name a bucket or folder after {protocol}://")
    if must_exist and protocol in _LOCAL and not Path(base).is_dir():
        raise ConfigError(f"checkpoint_mirror {url}: no such folder; create or mount it first")
    return Mirror(fs, url.rstrip("/"), base.rstrip("/"), run)


class Mirror:
    """The copies of one run below a URL. Any method may raise what its file system raises."""

    def __init__(self, fs: Any, url: str, base: str, run: str) -> None:
        self.fs, self.url, self.run = fs, f"{url}/{run}", run
        self._base, self._root = base, f"{base}/{run}"
        self._protocol = url.partition("://")[0]
        self._is_local = self._protocol in _LOCAL
        self._known: dict[str, Copy] = {}  # what was read once: a name means one content

    @staticmethod
    def in_time(act: Callable[..., T], *args: Any) -> T:
        """Return the result of `act(*args)`, or raise its error, or TimeoutError: a file system may wait forever."""
        answers: list[T | Exception] = []

        def ask() -> None:
            try:
                answers.append(act(*args))
            except Exception as error:
                answers.append(error)

        thread = threading.Thread(target=ask, name="mirror", daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        if not answers:
            raise TimeoutError(f"no answer in {ANSWER_SECONDS:.0f} s")
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def is_at(self, folder: Path) -> bool:
        """Tell whether this folder is that of the copies."""
        return self._is_local and Path(self._root).resolve() == folder.resolve()

    def list_copies(self) -> tuple[list[Copy], list[str]]:
        """Return the complete copies, newest first, and a line for each one that cannot be used."""
        copies, problems = [], []
        for name in filter(_COPY.fullmatch, self._names()):
            try:
                self._known[name] = self._known.get(name) or self._read_copy(name)
                copies.append(self._known[name])
            except FileNotFoundError:
                pass  # not complete
            except CheckpointError as error:
                problems.append(str(error))
        return sorted(copies, key=lambda copy: copy.recency, reverse=True), problems

    def _names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self._root, detail=False)
        except FileNotFoundError:
            top = self._base.partition("/")[0] if self._protocol in _BUCKETS else self._base
            if self._protocol in (*_BUCKETS, *_LOCAL) and not self.fs.exists(top):
                raise ConfigError(
                    f"checkpoint_mirror {self.url}: there is no {top}; create it, or correct the URL"
                ) from None
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def _read_copy(self, name: str) -> Copy:
        where = f"{self.url}/{name}"
        data = self.fs.cat_file(f"{self._root}/{name}/{MANIFEST}", end=MAX_MANIFEST_BYTES)
        file = JsonFile(Path(MANIFEST), CheckpointError)
        try:
            manifest = manifests.check_manifest(file, file.parse(data))
        except CheckpointError as error:
            raise CheckpointError(f"{where}/{error}") from error
        if copy_name(manifest) != name or manifest.get("run", self.run) != self.run:
            raise CheckpointError(f"{where}: holds another checkpoint than its name says")
        return Copy(name, manifest)

    def owner(self) -> str | None:
        """Return the id of the run whose copies these are; None if there are none yet.

        Raises: ConfigError if something else is there.
        """
        names = self._names()
        if not names:
            return None
        foreign = ConfigError(
            f"checkpoint_mirror {self.url}: holds other files than copies of a run; "
            f"choose another URL or --run_name"
        )
        if _OWNER not in names:
            raise foreign
        data = self.fs.cat_file(f"{self._root}/{_OWNER}", end=10_000)
        try:
            found = json.loads(data)
            if found["format"] == FORMAT:
                return str(found["id"])
        except (ValueError, KeyError, TypeError):
            if set(names) == {_OWNER}:
                return None  # torn by a kill, before anything else was written
        raise foreign

    def require_own(self, own: str | None) -> bool:
        """Tell whether the copies are said to be this run's; one that left no complete copy may be replaced.

        Raises: ConfigError if another run with this name has copies here.
        """
        if (owner := self.owner()) in (None, own):
            return owner is not None
        copies, problems = self.list_copies()
        if copies or problems:
            raise ConfigError(
                f"checkpoint_mirror {self.url}: holds checkpoints of another run of this name; continue that one "
                f"with --resume latest (a branch without --branch_from), or choose another --run_name"
            )
        return False

    def upload(self, folder: Path, manifest: dict[str, Any], tick: Tick = lambda: None) -> None:
        """Copy one checkpoint and what belongs to it; every byte read must have its manifest's hash.

        Raises: FileNotFoundError if the checkpoint is retired already; CheckpointError if it is damaged; ConfigError
        if the mirror is another run's.
        """
        run_dir, step = folder.parent, manifest["step"]
        place = f"{self._root}/{copy_name(manifest)}"
        names = [*manifest["files"], MANIFEST]
        with contextlib.ExitStack() as opened:
            # Open, they can be read to their end, also when the checkpoint is retired meanwhile.
            files = {name: opened.enter_context(open_regular(folder / name)) for name in names}
            self._claim(run_dir)
            if self._is_local:
                self.fs.makedirs(place, exist_ok=True)
                _sync_names(Path(self._root))
            log = opened.enter_context(open(run_dir / METRICS, "rb", opener=regular))
            size, digest = os.fstat(log.fileno()).st_size, hashlib.sha256()  # it goes on growing
            for block in _blocks(log, size):
                digest.update(block)
                tick()
            about = {
                "format": FORMAT,
                "log": {"bytes": size, "sha256": digest.hexdigest()},
                "files": [_OF_RUN, _METRICS, *names],
                "labels": catalog.read_labels(run_dir),
                "forecast": _text_of(run_dir / _FORECAST),
            }
            with self._open_new(f"{place}/{_OF_RUN}", tick) as remote:
                remote.write(json.dumps(about).encode())
            log.seek(0)
            with (
                self._open_new(f"{place}/{_METRICS}", tick) as remote,
                gzip.GzipFile("", "wb", fileobj=remote, mtime=0) as packed,
            ):
                for block in _blocks(log, size):
                    packed.write(block)
                    tick()
            for name, file in files.items():
                found = self._upload_file(file, f"{place}/{name}", name, step, tick)
                if name != MANIFEST and found != manifest["files"][name]:
                    raise CheckpointError(f"{folder / name}: damaged, not copied to {self.url}")

    def _upload_file(
        self, file: BinaryIO, path: str, name: str, step: int, tick: Tick
    ) -> dict[str, Any]:
        digest, num_bytes = hashlib.sha256(), 0
        with self._open_new(path, tick) as remote:
            while block := file.read(_BLOCK):
                tick()
                remote.write(block)
                # Block by block, so that a slow disk is not taken for one that hangs.
                if self._is_local:
                    remote.flush()
                    os.fsync(remote.fileno())
                digest.update(block)
                num_bytes += len(block)
                faultpoint(f"mirror.upload.{name}", step)
        self.fs.invalidate_cache()
        if (there := self.fs.info(path)["size"]) != num_bytes:
            raise OSError(f"{path}: {there} bytes arrived of {num_bytes}")
        return {"bytes": num_bytes, "sha256": digest.hexdigest()}

    @contextlib.contextmanager
    def _open_new(self, path: str, tick: Tick) -> Iterator[Any]:
        """Hand out a file that gets its name when the block ends well and `tick` agrees; else it is discarded.

        A thread that was given up may wake up in the middle, when another one has completed the copy.
        """
        tick()
        if self._is_local:  # the library's own temporary would be on another disk
            with staged_file(Path(path)) as temporary, open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                tick()
                os.replace(temporary, path)
            _sync_names(Path(path).parent)
            return
        remote = self.fs.open(path, "wb", autocommit=False)
        try:
            yield remote
            remote.close()
            tick()
            remote.commit()
        except BaseException:
            for end in (remote.close, remote.discard):
                with contextlib.suppress(Exception):  # the first error is the one to report
                    end()
            raise
        finally:
            with contextlib.suppress(ValueError):
                self.fs.transaction.files.remove(remote)  # else it is kept for good

    def _claim(self, run_dir: Path) -> None:
        """Write whose copies these are, if it is not there; two runs must not mix."""
        own = run_id(run_dir)
        if own is None:
            raise CheckpointError(
                f"{run_dir / METRICS}: has no first line, by which a mirror knows the run"
            )
        if self.require_own(own):
            return
        if self._is_local:
            self.fs.makedirs(self._root, exist_ok=True)
            _sync_names(Path(self._base))
        with self._open_new(f"{self._root}/{_OWNER}", lambda: None) as remote:
            remote.write(json.dumps({"format": FORMAT, "run": self.run, "id": own}).encode())

    def retire(
        self,
        labels: dict[str, str],
        *,
        keep: int,
        keep_emergency: int,
        uploaded: Collection[str] = (),
    ) -> list[str]:
        """Delete the copies that the run's rules keep no longer, and older ones that are not complete; return names.

        At least two are kept: what was uploaded is not read again. Those named in `uploaded` stay, whatever their time
        says. Only files that `upload` named are deleted.
        """
        copies = self.list_copies()[0][::-1]
        infos = [
            catalog.checkpoint_info(Path(folder_name(copy.step)), copy.manifest, labels)
            for copy in copies
        ]
        kept = catalog.to_keep(infos, keep=max(2, keep), keep_emergency=keep_emergency)
        kept += infos[-2:]
        old = [
            copy.name
            for copy, info in zip(copies, infos, strict=True)
            if info not in kept and copy.name not in uploaded
        ]
        complete = {copy.name for copy in copies}
        torn = [
            name
            for name in self._names()
            if _COPY.fullmatch(name) and name not in complete and copies
            if int(name[5:].partition("-")[0]) < copies[-1].step
        ]
        return [name for name in (*old, *torn) if self._delete(name)]

    def _delete(self, name: str) -> bool:
        place = f"{self._root}/{name}"
        try:
            about = json.loads(self.fs.cat_file(f"{place}/{_OF_RUN}", end=MAX_MANIFEST_BYTES))
            names = [one for one in about["files"] if is_file_name(one)]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False  # unknown: treated as not there
        # The manifest first, the list of names last: a torn deletion is an incomplete copy, to be deleted again.
        for file in (MANIFEST, *(set(names) - {MANIFEST, _OF_RUN}), _OF_RUN):
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(f"{place}/{file}")
            if self._is_local and file == MANIFEST:
                _sync_names(Path(place))  # a power cut must not bring it back without the rest
        self._known.pop(name, None)
        if self._is_local:
            sweep_temporaries(Path(place))
            with contextlib.suppress(OSError):
                self.fs.rmdir(place)
        return True

    def fetch(self, copy: Copy, run_dir: Path) -> Path:
        """Bring a copy into the run's folder, every byte verified, and return the checkpoint; call with it locked.

        The log and the labels come with it. A log there that has other lines is kept as metrics.jsonl.replaced-...

        Raises: CheckpointError or FileNotFoundError if the copy is damaged or not whole; nothing has changed then.
        """
        step, place = copy.step, f"{self._root}/{copy.name}"
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-mirror-", dir=run_dir) as name:
            staging, folder = Path(name), Path(name, "checkpoint")
            folder.mkdir()
            files = copy.manifest["files"]
            for file in (*files, MANIFEST):
                most = files[file]["bytes"] if file in files else MAX_MANIFEST_BYTES
                self._download(f"{place}/{file}", folder / file, most, step)
            try:
                if manifests.verify(folder) != copy.manifest:
                    raise CheckpointError(f"{folder / MANIFEST}: changed meanwhile")
                about = self._about(copy, staging)
            except CheckpointError as error:
                text = str(error).replace(str(folder), f"{self.url}/{copy.name}")
                raise CheckpointError(text) from error
            sync_folder(folder)
            self._restore_log(copy, about.get("log"), staging, run_dir)
            if about["forecast"] is not None:
                replace_durably(run_dir / _FORECAST, about["forecast"])
            (run_dir / LABELS).mkdir(exist_ok=True)
            for label, target in about["labels"].items():
                replace_durably(run_dir / LABELS / label, f"{target}\n")
            final = run_dir / folder_name(step)
            if final.exists():
                with contextlib.suppress(CheckpointError):
                    if manifests.verify(final) == copy.manifest:
                        return final  # on a shared disk, where it was not seen before
                os.rename(final, final.with_name(f"corrupt-{final.name}-{uuid.uuid4().hex[:4]}"))
            faultpoint("mirror.before_rename", step)
            os.rename(folder, final)
            sync_folder(run_dir)
        return final

    def _download(self, remote: str, path: Path, most: int, step: int) -> None:
        source, left = self.in_time(self.fs.open, remote, "rb"), most + 1
        try:
            with open(path, "xb") as file:
                while left > 0 and (block := self.in_time(source.read, min(_BLOCK, left))):
                    file.write(block)
                    left -= len(block)
                    faultpoint(f"mirror.download.{path.name}", step)
                file.flush()
                os.fsync(file.fileno())
        finally:  # beside, because it waits for a read that hangs
            threading.Thread(target=source.close, daemon=True).start()

    def _about(self, copy: Copy, staging: Path) -> dict[str, Any]:
        file = JsonFile(staging / _OF_RUN, CheckpointError)
        self._download(f"{self._root}/{copy.name}/{_OF_RUN}", file.path, file.at_most, copy.step)
        about = file.read()
        names = list_of((is_file_name, "a name"), "a list of names")
        file.check(
            about,
            {"format": TEXT, "files": names, "labels": OBJECT, "forecast": or_null(STRING)},
            {"log": object_with({"bytes": COUNT, "sha256": HASH}, "the log's size and hash")},
        )
        for label, target in about["labels"].items():
            if not is_file_name(label) or label.startswith(".") or not is_folder_name(target):
                raise file.rejected(f"label {label!r:.60} -> {target!r:.60} is none")
        return about

    def _restore_log(
        self, copy: Copy, wanted: dict[str, Any] | None, staging: Path, run_dir: Path
    ) -> None:
        """Put the copy's log in place, unless the existing one continues it; `wanted`: its size and hash.

        Copies of older versions record neither. A log of losses never shrinks to a hundredth of its size.
        """
        log, there = staging / METRICS, run_dir / METRICS
        packed, most = staging / _METRICS, wanted["bytes"] if wanted else _MOST_LOG
        remote, digest, size = f"{copy.name}/{_METRICS}", hashlib.sha256(), 0
        self._download(f"{self._root}/{remote}", packed, most + most // 1000 + 1024, copy.step)
        most = min(most, max(_MOST_LOG >> 10, 100 * packed.stat().st_size))
        try:
            with gzip.open(packed) as source, open(log, "xb") as file:
                for block in _blocks(source, most + 1):
                    file.write(block)
                    digest.update(block)
                    size += len(block)
                file.flush()
                os.fsync(file.fileno())
            if size > most or wanted not in (None, {"bytes": size, "sha256": digest.hexdigest()}):
                raise EOFError(f"other bytes than were packed, or over {most:,}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CheckpointError(f"{self.url}/{remote}: damaged ({error})") from error
        if there.exists():
            if _begins_with(there, log):
                return
            if not _begins_with(log, there):
                os.rename(there, there.with_name(f"{METRICS}.replaced-{uuid.uuid4().hex[:8]}"))
        os.replace(log, there)


def _blocks(file: BinaryIO | gzip.GzipFile, size: int) -> Iterator[bytes]:
    while size > 0 and (block := file.read(min(_BLOCK, size))):
        size -= len(block)
        yield block


def _sync_names(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where its file system can do that; network ones may not."""
    try:
        sync_folder(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def _text_of(path: Path) -> str | None:
    try:
        return read_regular(path, at_most=1 << 20).decode()
    except (OSError, ValueError):
        return None


def _begins_with(longer: Path, shorter: Path) -> bool:
    if longer.stat().st_size < shorter.stat().st_size:
        return False
    with open(longer, "rb", opener=regular) as long, open(shorter, "rb", opener=regular) as short:
        blocks: Iterable[bytes] = iter(lambda: short.read(_BLOCK), b"")
        return all(long.read(len(block)) == block for block in blocks)
