"""Read files as what they must be, and write files that survive a crash: on the disk before they get their name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpt2lab.errors import GPT2LabError

_MAX_DEPTH = 50  # of lists and objects in each other; a deeper file is meant to hurt


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes. A pipe or a device is rejected and never waited for.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, *, at_most: int) -> bytes:
    """Return the content of a regular file.

    Raises: OSError, also if it has over `at_most` bytes.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > at_most:
            raise OSError(errno.EFBIG, f"over {at_most} bytes", str(path))
        return file.read()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hex; the file is read in blocks.

    Raises: OSError.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_durably(path: Path, data: bytes) -> str:
    """Write a new file, flush it to the disk, and return its sha256 in hex.

    Raises: OSError (disk full, read-only), FileExistsError if the file is there already.
    """
    with _naming(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


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


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give an error of the disk the name that a write and a flush leave out."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def is_temporary(name: str) -> bool:
    """Tell whether a file's name is that of `replace_durably` before it renames."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}", name) is not None


def replace_durably(path: Path, content: str | bytes) -> None:
    """Replace a small file in one step: readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        write_durably(temporary, content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report; a start sweeps
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # the one that is known
        raise
    sync_folder(path.parent)


# -- JSON files of ours ----------------------------------------------------------------------------------------------

Rule = tuple[Callable[[Any], bool], str]  # of a value, and in words
Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class JsonFile:
    """A file that holds a JSON object of ours. Whatever it holds instead is one line, an `error`."""

    path: Path
    error: type[GPT2LabError]
    fix: str = ""
    at_most: int = 64 * 1024 * 1024  # bytes

    def rejected(self, problem: str) -> GPT2LabError:
        """Return the error that names the file, the problem and the fix."""
        return self.error(f"{self.path}: {problem}" + (f"; {self.fix}" if self.fix else ""))

    def read(self) -> dict[str, Any]:
        """Return the object, whose numbers are finite.

        Raises: `error`.
        """
        try:
            found = parse_json(read_regular(self.path, at_most=self.at_most))
        except OSError as error:
            raise self.error(f"{self.path}: {error.strerror}") from error
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
        for key in rules:
            if key not in found:
                raise self.rejected(f"{where}no {key!r}")
        for key, (is_fine, wanted) in {**rules, **(optional or {})}.items():
            if key in found and not is_fine(found[key]):
                raise self.rejected(f"{where}{key!r} is {found[key]!r:.60}, not {wanted}")


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
STRING: Rule = (
    lambda value: isinstance(value, str),
    "text",
)  # also empty, also with control characters
COUNT: Rule = (is_count, "a whole number")
SIZE: Rule = (lambda value: is_count(value) and value > 0, "a whole number above 0")
FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
NUMBER: Rule = (is_number, "a number")
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


def or_null(rule: Rule) -> Rule:
    """Return the rule of a value that may be null."""
    is_fine, wanted = rule
    return lambda value: value is None or is_fine(value), f"{wanted} or null"
