"""The ways a door may refuse. Each carries the exit code that scripts rely on (README, "A run's folder")."""

from __future__ import annotations

import errno


class GPT2LabError(Exception):
    """A refusal: one line that says what, where and the fix."""

    exit_code = 2
    is_local = False  # one of many processes met it alone, so that no other can report it


class ConfigError(GPT2LabError):
    """Flags or settings that cannot work, a refused resume, a held lock."""


class DataError(GPT2LabError):
    """Missing, damaged or unfit token data."""


class SourceLostError(DataError):
    """A source of text broke off (the network, mostly); what was prepared so far is kept."""


class CheckpointError(GPT2LabError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class SaveError(GPT2LabError):
    """The state could not be written when it had to be (at a stop or at the end)."""

    exit_code = 75


class NonFiniteError(GPT2LabError):
    """Loss or gradient is NaN or infinite; the weights were not updated with it."""

    exit_code = 76


class NoSourceError(GPT2LabError):
    """Nothing to base a forecast on: no run, no known hardware, no measurement."""

    exit_code = 4


class DriftError(GPT2LabError):
    """Processes that should hold the same weights do not."""

    exit_code = 1


class PeerError(GPT2LabError):
    """Another process of the run is gone."""

    exit_code = 1
    is_local = True


class OutOfMemoryError(GPT2LabError):
    """The device has no room for what a step needs."""

    exit_code = 1
    is_local = True


class TornUpdateError(Exception):
    """An error within the optimizer: some weights moved and others did not, so nothing of them may be saved."""


class CheckError(GPT2LabError):
    """Something was computed and compared, and does not hold."""

    exit_code = 1


_REFUSED_BY_THE_SYSTEM = {
    errno.EACCES: "give this user the right to it, or choose another place",
    errno.EPERM: "give this user the right to it, or choose another place",
    errno.EROFS: "choose another place",
    errno.ENOTDIR: "choose another place",
    errno.ELOOP: "choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOSPC: "free space and start again",
    errno.EDQUOT: "free space and start again",
}


def refusal_of(error: BaseException) -> GPT2LabError | None:
    """Return an error as a refusal: ours as it is, what the system refuses (no bug) as one of ours; else None."""
    if isinstance(error, GPT2LabError):
        return error
    if not isinstance(error, OSError) or error.errno not in _REFUSED_BY_THE_SYSTEM:
        return None
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    refusal = (SaveError if is_full else ConfigError)(
        f"{what}; {_REFUSED_BY_THE_SYSTEM[error.errno]}"
    )
    refusal.is_local = True  # the others may have been let
    refusal.__cause__ = error
    return refusal


def is_lost_peer(error: Exception) -> bool:
    """Tell whether an error says that another process is gone: in our words, gloo's or NCCL's."""
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process",
    )
    said_by_library = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said_by_library or isinstance(error, PeerError)
