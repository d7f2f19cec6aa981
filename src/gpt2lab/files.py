"""Read files as what they must be, and write files that survive a crash: on the disk before they get their name."""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from gpt2lab.errors import GPT2LabError

_MAX_DEPTH = 50  # of lists and objects in each other; a deeper file is meant to hurt
_BLOCK = 1 << 22  # bytes that are written and hashed at a time


_KINDS = dict(
    zip("-dlpscb", ["file", "folder", "link", "pipe", "socket", "device", "device"], strict=True)
)
_MOST_HOLES = 64 << 20  # bytes: a power cut may leave some; to read terabytes of zeros takes hours


def wrong_kind(path: str | Path, *, wanted: str = "file", follow: bool = False) -> str | None:
    """Say what is there instead of a file (or a folder): `a link, not a file`; None also if nothing is."""
    try:
        kind = _KINDS[stat.filemode(os.stat(path, follow_symlinks=follow).st_mode)[0]]
    except OSError:  # whoever opens it learns why
        return None
    return None if kind == wanted else f"a {kind}, not a {wanted}"


def regular(path: str | Path, flags: int) -> int:
    """Open a text file of a run: the `opener` of each. No link is followed, and nothing is waited for.

    Raises: OSError for a link, a pipe, a socket, a device, a folder, and for a file of holes.
    """
    descriptor = _open_regular(path, flags)
    found = os.fstat(descriptor)
    # A disk that compresses stores less than the size too, and has no holes then.
    if found.st_size - 512 * found.st_blocks > _MOST_HOLES:
        hole = found.st_size
        with suppress(OSError):  # of a disk that cannot tell
            hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
        os.lseek(descriptor, 0, os.SEEK_SET)
        if hole < found.st_size:
            os.close(descriptor)
            what = f"{os.path.basename(path)} has holes, which nothing wrote"
            raise OSError(errno.ELOOP, what, str(path))
    return descriptor


def _open_regular(path: str | Path, flags: int, *, follow: bool = False) -> int:
    problem = wrong_kind(path, follow=follow)  # before: some devices act when they are opened
    if problem is None:
        flags |= os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.set_blocking(descriptor, True)
            return descriptor
        os.close(descriptor)
    raise OSError(errno.ELOOP, problem or "not a file", str(path))


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file to read its bytes; `follow`: also through a link, as data and models of a user may lie.

    Raises: OSError.
    """
    return open(path, "rb", opener=partial(_open_regular, follow=follow))


def read_regular(path: Path, *, at_most: int, follow: bool = False) -> bytes:
    """Return the content of a regular file.

    Raises: OSError, also if it has over `at_most` bytes.
    """
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > at_most:
            raise OSError(errno.E2BIG, f"over {at_most} bytes", str(path))
        return file.read()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hex; the file is read in blocks.

    Raises: OSError.
    """
    digest = hashlib.sha256()
    with open_regular(path, follow=True) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_durably(path: Path, *parts: bytes | memoryview) -> str:
    """Write a new file of these parts, flush it to the disk, and return its sha256 in hex.

    Large parts are hashed while they are written, by a second thread.

    Raises: OSError (disk full, read-only), FileExistsError if the file is there already.
    """
    from concurrent.futures import ThreadPoolExecutor  # here: quick commands never need it

    digest = hashlib.sha256()
    with (
        ThreadPoolExecutor(1) as hasher,
        _naming(path),
        open(path, "xb", buffering=_BLOCK) as file,  # small parts are written together
    ):
        for block in _blocks(parts):
            if len(block) < _BLOCK:
                digest.update(block)
                file.write(block)
            else:
                hashed = hasher.submit(digest.update, block)
                file.write(block)
                hashed.result()
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _blocks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for begin in range(0, len(view), _BLOCK):
            yield view[begin : begin + _BLOCK]


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give an error of the disk the name that a write and a flush leave out."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def replace_durably(path: Path, content: str | bytes) -> None:
    """Replace a small file in one step: readers see the old content or the new one."""
    data = content.encode() if isinstance(content, str) else content
    try:
        with staged_file(path) as temporary, open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # the one that is known
        raise
    sync_folder(path.parent)


def create_durably(path: Path, data: bytes) -> None:
    """Write a new file in one step: it is there complete, or not at all.

    Raises: OSError, FileExistsError if the file is there already.
    """
    with staged_new_file(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


# -- temporaries -----------------------------------------------------------------------------------------------------

_HEX = "[0-9a-f]" * 8


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Hand out a new folder beside `path`; when the block ends well it is flushed and becomes `path`, in one step.

    Raises: OSError; `path` is then as it was, and nothing else is left.
    """
    with temporary_folder(path) as folder:
        yield folder
        for file in folder.iterdir():
            _sync(file)
        sync_folder(folder)
        os.rename(folder, path)
    sync_folder(path.parent)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Hand out a new folder beside `path`, and remove it in the end.

    Raises: OSError.
    """
    with _temporary(path, make=lambda temporary: temporary.mkdir(parents=True)) as folder:
        yield folder


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Hand out a new, empty file beside `path`, for the block to rename; it is removed if that does not happen.

    Raises: OSError.
    """
    with _temporary(path, make=lambda temporary: temporary.touch(exist_ok=False)) as file:
        yield file


@contextmanager
def staged_new_file(path: Path) -> Iterator[Path]:
    """Hand out a new file beside `path`; when the block ends well it is flushed and becomes `path`, in one step.

    Raises: OSError, FileExistsError if `path` is there already; nothing else is left then.
    """
    with staged_file(path) as temporary:
        yield temporary
        _sync(temporary)
        try:
            os.link(temporary, path)  # unlike a rename it replaces nothing
        except FileExistsError as error:
            error.filename = str(path)
            raise
        except OSError:  # a disk without links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            os.rename(temporary, path)
    sync_folder(path.parent)


@contextmanager
def _temporary(path: Path, *, make: Callable[[Path], None]) -> Iterator[Path]:
    """Sweep what killed processes left of `path`, and make a temporary of its own, locked as long as it is one."""
    if (problem := wrong_kind(path)) == "a device, not a file":  # /dev/null must stay one
        raise OSError(errno.ELOOP, problem, str(path))
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{_HEX}"):
        sweep(leftover)
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        make(temporary)
        try:
            descriptor = _open_locked(temporary, fcntl.LOCK_EX)
        except OSError:
            _remove(temporary)
            raise
        if descriptor is not None:
            break  # else it was taken for a leftover in the instant before it was locked
    try:
        yield temporary
    finally:
        _remove(temporary)
        os.close(descriptor)


def sweep(leftover: Path) -> None:
    """Remove a temporary file or folder whose process was killed; a live one holds it locked."""
    if not leftover.is_file() and not leftover.is_dir():  # a pipe or a device is none of ours
        return
    with suppress(OSError):
        if (descriptor := _open_locked(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
            return
        try:
            _remove(leftover)
        finally:
            os.close(descriptor)


def sweep_temporaries(folder: Path) -> None:
    """Remove the temporaries of all files in a folder whose processes were killed."""
    for leftover in folder.glob(f".*.{_HEX}"):
        sweep(leftover)


def _open_locked(path: Path, how: int) -> int | None:
    """Open and lock a file or folder; None if that name no longer is what was locked.

    Raises: OSError if another process holds it; a new temporary's disk may know no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        if how & fcntl.LOCK_NB:
            os.close(descriptor)
            raise
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor)):
            return descriptor
    os.close(descriptor)
    return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # the first error is the one to report; a start sweeps
            path.unlink()


def _sync(path: Path) -> None:
    with open_regular(path) as file:
        os.fsync(file.fileno())


# -- JSON files of ours ----------------------------------------------------------------------------------------------

Rule = tuple[Callable[[Any], bool], str]  # of a value, and in words
Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class JsonFile:
    """A file that must hold a JSON object. Anything else raises `error`, with a message of one line."""

    path: Path
    error: type[GPT2LabError]
    fix: str = ""
    at_most: int = 64 * 1024 * 1024  # bytes
    follow: bool = False  # also through a link, see `open_regular`

    def rejected(self, problem: str) -> GPT2LabError:
        """Return the error that names the file, the problem and the fix."""
        return self.error(f"{self.path}: {problem}" + (f"; {self.fix}" if self.fix else ""))

    def read(self) -> dict[str, Any]:
        """Return the object, whose numbers are finite.

        Raises: `error`.
        """
        try:
            return self.parse(read_regular(self.path, at_most=self.at_most, follow=self.follow))
        except OSError as error:
            raise self.error(f"{self.path}: {error.strerror}") from error

    def parse(self, content: bytes) -> dict[str, Any]:
        """Return the object in the file's content, whose numbers are finite.

        Raises: `error`.
        """
        try:
            found = parse_json(content)
        except ValueError as error:
            raise self.rejected(f"not readable as JSON ({error})") from error
        if not isinstance(found, dict):
            raise self.rejected("not a JSON object")
        return found

    def check(
        self, found: Mapping[str, Any], rules: Rules, optional: Rules | None = None, where: str = ""
    ) -> None:
        """Check the values of an object in it: every key of `rules` must be there, those of `optional` may be.

        Raises: `error`.
        """
        if (problem := mismatch(found, rules, optional)) is not None:
            raise self.rejected(where + problem)


def mismatch(found: Mapping[str, Any], rules: Rules, optional: Rules | None = None) -> str | None:
    """Return what is wrong with an object whose keys must follow `rules`; those of `optional` may be missing."""
    for key in rules:
        if key not in found:
            return f"no {key!r}"
    for key, (is_fine, wanted) in {**rules, **(optional or {})}.items():
        if key in found and not is_fine(found[key]):
            return f"{key!r} is {found[key]!r:.60}, not {wanted}"
    return None


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises: ValueError if it is none, is nested too deep, or has a number that is not finite.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    inside = [value]
    for _ in range(_MAX_DEPTH):
        inside = [
            one
            for value in inside
            if isinstance(value, dict | list)
            for one in (value.values() if isinstance(value, dict) else value)
        ]
    if inside:
        raise ValueError("nested too deep")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is not a finite number")
    return value


def is_count(value: Any) -> bool:
    """Tell whether a value is a whole number from 0 up that floating-point numbers hold exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def is_file_name(value: Any) -> bool:
    """Tell whether a value is the name of a file, without a folder."""
    return _is_text(value) and "/" not in value and value not in (".", "..")


TEXT: Rule = (_is_text, "text")
# Also empty, also with control characters.
STRING: Rule = (lambda value: isinstance(value, str), "text")
COUNT: Rule = (is_count, "a whole number")
SIZE: Rule = (lambda value: is_count(value) and value > 0, "a whole number above 0")
NUMBER: Rule = (is_number, "a number")
POSITIVE: Rule = (lambda value: is_number(value) and value > 0, "a number above 0")
HASH: Rule = (
    lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)),
    "64 hex digits",
)
NAME: Rule = (is_file_name, "the name of a file, without a folder")
OBJECT: Rule = (lambda value: isinstance(value, dict), "an object")


def one_of(*values: str) -> Rule:
    """Return the rule of a value that is one of some words."""
    return lambda value: isinstance(value, str) and value in values, " or ".join(values)


def list_of(rule: Rule, name: str) -> Rule:
    """Return the rule of a list whose values follow a rule."""
    is_fine = rule[0]
    return lambda value: isinstance(value, list) and all(map(is_fine, value)), name


def object_of(rule: Rule, name: str) -> Rule:
    """Return the rule of an object whose values follow a rule."""
    is_fine = rule[0]
    return lambda value: isinstance(value, dict) and all(map(is_fine, value.values())), name


def object_with(rules: Rules, name: str) -> Rule:
    """Return the rule of an object that has these keys, and values that follow their rules."""
    return lambda value: isinstance(value, dict) and mismatch(value, rules) is None, name


def or_null(rule: Rule) -> Rule:
    """Return the rule of a value that may be null."""
    is_fine, wanted = rule
    return lambda value: value is None or is_fine(value), f"{wanted} or null"
