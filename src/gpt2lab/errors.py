"""Errors that end a command with one line and an exit code that scripts rely on: 2 unless a class says otherwise."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")  # of ASCII and of Latin-1


def printable(text: str, keep: str = "") -> str:
    """Return text with all control characters but `keep` as escape codes, so that it cannot move the cursor."""

    def code(match: re.Match[str]) -> str:
        found = match[0]
        return found if found in keep else found.encode("unicode_escape").decode()

    return _CONTROL.sub(code, text)


class GPT2LabError(Exception):
    """An error whose message is one line: what is wrong, where, and the fix."""

    exit_code = 2
    is_local = False  # True if only this rank knows of it, so that it must report it itself

    def __str__(self) -> str:
        """Return the message, whatever a file brought into it."""
        return printable(super().__str__())


class ConfigError(GPT2LabError):
    """Flags or settings that cannot work, a rejected resume, a held lock."""


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one ConfigError for all problems; do nothing if there are none."""
    if said := "; ".join(problems):
        raise ConfigError(said)


class InUseError(ConfigError):
    """Another process holds the run's folder now; the same command may work later."""


class DataError(GPT2LabError):
    """Missing, damaged or unfit token data."""


class CheckpointError(GPT2LabError):
    """A checkpoint is missing, damaged or belongs to another model."""


class UnreachableError(CheckpointError):
    """A store does not answer now; the same command may work later."""


class SaveError(GPT2LabError):
    """What a program computed could not be saved: the state of a run, a report, data."""

    exit_code = 75


class SavedInterrupt(KeyboardInterrupt):
    """Ctrl+C, after which all that was done is saved: exit code 0, as of a trainer that was asked to stop."""


class FolderLostError(SaveError):
    """The run's folder was moved, deleted or taken by another start: nothing more may be written there."""


class NonFiniteError(GPT2LabError):
    """Loss or gradient is NaN or infinite; the weights were not updated with it."""

    exit_code = 76


class DriftError(GPT2LabError):
    """Replicas of the weights differ between ranks."""

    exit_code = 1


class PeerError(GPT2LabError):
    """Another rank of the run is gone."""

    exit_code = 1
    is_local = True


class OutOfMemoryError(GPT2LabError):
    """A step needs more memory than the device has."""

    exit_code = 1
    is_local = True


class PartialUpdateError(Exception):
    """An error within the optimizer step: some weights are updated and others are not, so none may be saved."""


class CheckError(GPT2LabError):
    """A comparison of computed values failed."""

    exit_code = 1


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # only writing meets these
_FIXES = {  # of system errors that are not bugs
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "give this user the right to it, or choose another place"
    ),
    **dict.fromkeys((errno.EROFS, errno.ENOTDIR), "choose another place"),
    **dict.fromkeys((errno.ELOOP, errno.EISDIR), "remove it, or choose another place"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space and start again"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (`ulimit -n`)"),
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`), or choose another disk",
    errno.EIO: "its disk fails; repair it, or choose another place, and start again",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def to_gpt2lab_error(error: BaseException) -> GPT2LabError | None:
    """Return one of this project's errors as it is, and a system error that is not a bug as one of them; else None."""
    if isinstance(error, GPT2LabError):
        return error
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return ConfigError(f"{error.strerror}; set TMPDIR to a folder that can be written")
    if not isinstance(error, OSError) or error.errno not in _FIXES:
        return None
    kind = SaveError if error.errno in (*_NO_ROOM, errno.EIO) else ConfigError
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    found = kind(f"{what}; {_FIXES[error.errno]}")
    found.is_local = True  # other ranks may have succeeded
    found.__cause__ = error
    return found


@contextlib.contextmanager
def system_errors_as(
    kind: type[GPT2LabError], where: object, *, what: str | None = None, fix: str | None = None
) -> Iterator[None]:
    """Raise a system error of the block as `kind`: `WHERE: reason; FIX`, or `WHERE: WHAT (reason); FIX`.

    Without `fix` it is the one that suits the error. One that says nothing about the place passes: no memory is left.
    A file for which there is no room is a SaveError.
    """
    try:
        yield
    except OSError as error:
        if is_out_of_memory(error):
            raise
        reason = error.strerror or str(error)
        said = reason if what is None else f"{what} ({reason})"
        fix = fix or _FIXES.get(error.errno or 0)
        kind = SaveError if error.errno in _NO_ROOM else kind
        raise kind(f"{where}: {said}" if fix is None else f"{where}: {said}; {fix}") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error says that memory is used up, a GPU's or a CPU's, or that no thread or process can start."""
    if isinstance(error, OSError):
        is_full_pipe = hasattr(error, "characters_written")  # EAGAIN too
        return error.errno in (errno.ENOMEM, errno.EAGAIN) and not is_full_pipe
    words = r"DefaultCPUAllocator: .*memory|std::bad_alloc|Cannot allocate memory|can't start new thread"
    words += "|Failed to launch worker thread|ThreadPoolBuildError"
    is_of_library = type(error).__name__ in ("ArrowException", "PanicException")
    if isinstance(error, ImportError):  # a library has no room for its code
        return "failed to map segment from shared object" in str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
        or (
            (isinstance(error, RuntimeError) or is_of_library)
            and re.search(words, str(error)) is not None
        )
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an error says that another rank is gone: a PeerError, or one of gloo's or NCCL's."""
    words = r"Connection (closed|reset) by peer|Broken pipe|remote process"
    by_library = isinstance(error, RuntimeError) and re.search(words, str(error)) is not None
    return by_library or isinstance(error, PeerError)
