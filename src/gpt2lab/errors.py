"""The ways a door may refuse. Each carries the exit code that scripts rely on (README, "A run's folder")."""

from __future__ import annotations


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
