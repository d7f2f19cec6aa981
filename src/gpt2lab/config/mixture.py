"""The folders of a run and their weights: --data_dir, --data_weights_at and --max_source_epochs. No torch.

A single word of --data_dir is a folder, whatever its name contains. Several are a mixture: each is PATH:WEIGHT, divided
at the last colon.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import fmt
from gpt2lab.config.schema import DataConfig
from gpt2lab.errors import ConfigError

_MOST_TOKENS = 10**18


@dataclass(frozen=True)
class Phase:
    """Weights from a number of tokens on, those included that a rewind skipped; they need not add up to 1."""

    from_tokens: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class DataSources:
    """The folders that a run trains on; a single one has one phase of weight 1."""

    folders: tuple[Path, ...]
    names: tuple[str, ...]  # the folders' own, with as many parents as make them differ
    phases: tuple[Phase, ...]  # the first from 0 tokens on
    max_epochs: tuple[float | None, ...]  # the most epochs of each; None: any number


def read_sources(data: DataConfig) -> DataSources:
    """Return the folders, names, weights and limits that the three settings give.

    Raises: ConfigError for the first setting that cannot be used.
    """
    words = data.data_dir
    if not words:
        raise ConfigError("data_dir: no folder given")
    single = len(words) == 1
    entries = [(Path(words[0]), 1.0)] if single else [_split_folder(word) for word in words]
    folders = tuple(folder for folder, _ in entries)
    for number, folder in enumerate(folders):
        if any(os.path.abspath(folder) == os.path.abspath(other) for other in folders[:number]):
            raise ConfigError(f"data_dir {folder}: given twice; give it once, with the sum of both")
    names = _names(folders)
    if single and data.data_weights_at:
        raise ConfigError(
            f"data_weights_at {' '.join(data.data_weights_at)}: changes the weights of a mixture, and data_dir is "
            f"one folder; give several as PATH:WEIGHT, or --data_weights_at None"
        )
    later = [_read_phase(word, names) for word in data.data_weights_at]
    phases = (Phase(0, tuple(weight for _, weight in entries)), *later)
    for before, after in zip(phases, later, strict=False):
        if after.from_tokens <= before.from_tokens:
            raise ConfigError(
                f"data_weights_at {after.from_tokens}: not later than {before.from_tokens}; give ascending tokens"
            )
    for source, name in enumerate(names):
        if not any(phase.weights[source] for phase in phases):
            raise ConfigError(
                f"data_dir {name}: weight 0 is never trained on; omit it, or give it a weight above 0"
            )
    for phase in phases:
        if not any(phase.weights):
            raise ConfigError(f"data_weights_at {phase.from_tokens}: every weight is 0")
    return DataSources(folders, names, phases, _read_limits(data.max_source_epochs, names))


def normal_words(
    name: str, words: Sequence[str], resolve: Callable[[Path], Path]
) -> tuple[str, ...]:
    """Return the words of one of the three settings as a run records them: full paths, plain numbers.

    Raises: ConfigError if they cannot be read.
    """
    if name != "data_dir" and list(words) == ["None"]:  # no value, as of other settings
        return ()
    if name == "data_dir" and len(words) == 1:
        return (str(resolve(Path(words[0]))),)
    if name == "data_dir":
        entries = [_split_folder(word) for word in words]
        return tuple(f"{resolve(folder)}:{weight:.15g}" for folder, weight in entries)
    if name == "data_weights_at":
        phases = [_read_phase(word) for word in words]
        return tuple(
            f"{phase.from_tokens}:{','.join(f'{w:.15g}' for w in phase.weights)}"
            for phase in phases
        )
    return tuple(words)


def _split_folder(word: str) -> tuple[Path, float]:
    folder, colon, text = word.rpartition(":")
    try:
        weight = float(text)
    except ValueError:
        colon = ""
    if not colon or not folder:
        raise ConfigError(
            f"data_dir {word}: has no weight; several folders are a mixture and each is PATH:WEIGHT, "
            f"such as web:0.7 code:0.3"
        )
    return Path(folder), _checked_weight(weight, f"data_dir {word}")


def _checked_weight(weight: float, where: str) -> float:
    if not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"{where}: weight {weight:g} is not a finite number from 0 up")
    return weight


def _read_phase(word: str, names: Sequence[str] | None = None) -> Phase:
    """Read TOKENS:W,W,...; `names`, where given, says how many weights there must be."""
    tokens, _, weights = word.rpartition(":")
    try:
        phase = Phase(fmt.parse_count(tokens), tuple(float(text) for text in weights.split(",")))
        if phase.from_tokens > _MOST_TOKENS:
            raise ValueError(tokens)
    except ValueError:
        raise ConfigError(
            f"data_weights_at {word}: not TOKENS:WEIGHT,WEIGHT,..., such as 900M:0.2,0.8"
        ) from None
    for weight in phase.weights:
        _checked_weight(weight, f"data_weights_at {word}")
    if names is not None and len(phase.weights) != len(names):
        raise ConfigError(
            f"data_weights_at {word}: {len(phase.weights)} weights for {len(names)} folders; "
            f"give one for each of {', '.join(names)}"
        )
    return phase


def _read_limits(words: Sequence[str], names: Sequence[str]) -> tuple[float | None, ...]:
    """Read N, for every source, and NAME:N, for one."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise ConfigError(
                f"max_source_epochs {word}: not a number of epochs above 0, or NAME:NUMBER"
            )
        if name and name not in names:
            raise ConfigError(
                f"max_source_epochs {word}: no source {name}; the sources are {', '.join(names)}"
            )
        limits |= {name: limit} if name else {n: limit for n in names if n not in limits}
    return tuple(limits.get(name) for name in names)


def _names(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return the shortest ends of the paths that all differ, at least the folders' own names."""
    for depth in range(1, 1 + max(len(folder.parts) for folder in folders)):
        names = tuple("/".join(folder.parts[-depth:]) for folder in folders)
        if len(set(names)) == len(names):
            return names
    return tuple(map(str, folders))
