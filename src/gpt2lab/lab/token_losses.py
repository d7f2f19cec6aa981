"""The losses of single validation tokens in a file, and beside it which tokens they are of. No torch.

token_losses.npy is (N, T) fp16: window by window, target by target. token_losses.json names the data, the windows and
the hash of the array. It is written last, so that an array of another evaluation is never taken for its own.
Rounding to fp16 moves a loss by at most 2^-11 of it, up as often as down.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2lab.data.mixture import PATTERN, MixedData
from gpt2lab.data.shards import TokenData
from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import (
    COUNT,
    HASH,
    NUMBER,
    OBJECT,
    SIZE,
    TEXT,
    JsonFile,
    list_of,
    or_null,
    read_regular,
    replace_durably,
)
from gpt2lab.runs import evaluations, history
from gpt2lab.runs.target import find_folder, run_and_step
from gpt2lab.training.extension import Extension, LiveRun

if TYPE_CHECKING:
    from gpt2lab.evaluation.validation import ValidationLoss

LOSSES, FACTS = "token_losses.npy", "token_losses.json"
FORMAT = "gpt2lab-token-losses/1"
_MOST_BYTES = 2**33
_RULES = {
    **{"format": TEXT, "step": or_null(COUNT), "attempt": or_null(COUNT), "val_loss": NUMBER},
    **{"context_length": SIZE, "sources": list_of(OBJECT, "a list of objects"), "sha256": HASH},
}
_SOURCE_RULES = {
    **{"name": TEXT, "folder": TEXT, "fingerprint": TEXT, "tokenizer": or_null(HASH)},
    **{"weight": NUMBER, "windows": SIZE, "windows_sha256": HASH},
}


@dataclass(frozen=True)
class Source:
    """The windows of one folder of token shards."""

    name: str
    folder: str  # where it lay
    fingerprint: str
    tokenizer: str | None  # its hash; None where it is not known
    weight: float  # in the mean of a mixture; the weights of all sources add up to 1
    windows: int
    windows_sha256: str  # of their ids


@dataclass(frozen=True)
class TokenLosses:
    """The losses of one evaluation, and what they are of."""

    losses: np.ndarray  # (N, T) fp16, the windows of the first source first
    val_loss: float  # nats/token, computed before the losses were rounded
    sources: tuple[Source, ...]
    step: int | None = None  # None: not of a run
    attempt: int | None = None  # the start of the run that measured it

    def layout(self) -> tuple[Any, ...]:
        """Return what two evaluations must share to be compared token by token."""
        windows = [(s.weight, s.windows, s.windows_sha256, s.tokenizer) for s in self.sources]
        return (self.losses.shape[1], *windows)


def describe_losses(
    loss: ValidationLoss, data: TokenData, *, step: int | None, attempt: int | None
) -> TokenLosses:
    """Return the token losses that an evaluation on `data` kept."""
    assert loss.token_losses is not None
    names: tuple[str, ...] = (data.folder.name,)
    weights = [1.0]
    if isinstance(data, MixedData):
        names, weights = data.names, [count / PATTERN for count in data.places()[0][1]]
    T = loss.token_losses.shape[1]
    measured = [*loss.by_source.values()] or [loss]
    sources = tuple(
        Source(
            name=name,
            folder=str(source.folder.absolute()),
            fingerprint=source.fingerprint,
            tokenizer=None if source.tokenizer is None else source.tokenizer.hash,
            weight=weight,
            windows=of.val_tokens // T,
            windows_sha256=str(of.results.units["windows"]),
        )
        for name, source, weight, of in zip(names, data.by_source(), weights, measured, strict=True)
    )
    return TokenLosses(loss.token_losses, loss.val_loss, sources, step, attempt)


def write_token_losses(folder: Path, kept: TokenLosses) -> None:
    """Write the two files; those of an earlier evaluation are replaced.

    Raises: OSError.
    """
    content = io.BytesIO()
    np.save(content, kept.losses.astype("<f2", copy=False))
    facts = {
        "format": FORMAT,
        "step": kept.step,
        "attempt": kept.attempt,
        "val_loss": kept.val_loss,
        "context_length": kept.losses.shape[1],
        "sources": [asdict(source) for source in kept.sources],
        "sha256": hashlib.sha256(content.getbuffer()).hexdigest(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    replace_durably(folder / LOSSES, content.getvalue())
    replace_durably(folder / FACTS, json.dumps(facts, indent=1) + "\n")


def read_token_losses(folder: Path) -> TokenLosses:
    """Read both files and compare the array with its hash.

    Raises: DataError naming the file.
    """
    again = "measure it again with --keep_token_losses"
    file = JsonFile(folder / FACTS, DataError, again)
    facts = file.read()
    file.check(facts, {"format": TEXT})
    if facts["format"] != FORMAT:
        raise file.rejected(f"format {facts['format']!r}, this version reads {FORMAT!r}")
    file.check(facts, _RULES)
    for source in facts["sources"]:
        file.check(source, _SOURCE_RULES, where="sources: ")
    sources = tuple(
        Source(**{name: source[name] for name in _SOURCE_RULES}) for source in facts["sources"]
    )
    path = folder / LOSSES
    with system_errors_as(DataError, path, fix=again):
        content = read_regular(path, at_most=_MOST_BYTES)
    if hashlib.sha256(content).hexdigest() != facts["sha256"]:
        raise DataError(f"{path}: damaged (its sha256 is not the one in {FACTS}); {again}")
    try:
        losses = np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path}: not a .npy file ({error}); {again}") from error
    shape = (sum(source.windows for source in sources), facts["context_length"])
    if losses.dtype != np.float16 or losses.shape != shape:
        raise DataError(f"{path}: {losses.dtype} {losses.shape}, not float16 {shape}; {again}")
    return TokenLosses(losses, facts["val_loss"], sources, facts["step"], facts["attempt"])


def find_token_losses(name: str, checkpoint_dir: Path) -> TokenLosses:
    """Return the token losses that a run (its newest), a checkpoint or a folder of evaluate.py --save holds.

    Raises: DataError that says how to make them.
    """
    folder = None if name.endswith(".npz") else find_folder(name, checkpoint_dir)
    places = [] if folder is None else [folder]
    if folder is not None and (of_run := run_and_step(folder)) is not None:
        run_dir, step = of_run
        places = evaluations.current_folders(run_dir, history.read_log(run_dir), FACTS, step)
    for place in places:
        if (place / FACTS).exists():
            return read_token_losses(place)
    raise DataError(
        f"{name}: holds no token losses (training keeps them at its end alone, not at a stop); "
        f"keep them with gpt2lab evaluate {name} --keep_token_losses"
    )


class TokenLossKeeper(Extension):
    """Keeps the losses of single validation tokens of the last step, for `compare --explain`."""

    def started(self, run: LiveRun) -> None:
        """Note whose losses they are."""
        self._start = run.start

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Write the losses of an evaluation that kept them."""
        from gpt2lab.evaluation.validation import ValidationLoss

        if not isinstance(result, ValidationLoss) or result.token_losses is None:
            return
        start, step = self._start, event["step"]
        kept = describe_losses(result, start.data, step=step, attempt=start.attempt)
        folder = evaluations.items_folder(start.run_dir, step)
        try:
            write_token_losses(folder, kept)
        except OSError as error:
            raise OSError(f"{folder}: not written ({error.strerror})") from error
