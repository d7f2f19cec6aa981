"""A run as it was recorded, and the tokens that a step trained on, checked against the logged hash."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.catalog import CheckpointInfo, list_checkpoints
from gpt2lab.config.mixture import normal_words
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override, to_flat
from gpt2lab.data.mixture import Mixture, missing_folders, require_folders, training_order
from gpt2lab.data.shards import TokenData, document_marks
from gpt2lab.data.windows import WindowReader, hash_windows
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.runs import history
from gpt2lab.runs.history import Log
from gpt2lab.training.recipe import Recipe


@dataclass(frozen=True)
class RecordedRun:
    """The folder of a run, its recipe, and where its data is now, if it was moved; its files are read once."""

    folder: Path
    recipe: Recipe
    data_dir: tuple[str, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """The folder as messages show it."""
        return paths.display_path(self.folder)

    @functools.cached_property
    def config(self) -> Config:
        """The settings of the last start."""
        return history.read_config(self.folder)

    @functools.cached_property
    def log(self) -> Log:
        """The run's log."""
        return history.read_log(self.folder)

    @functools.cached_property
    def checkpoints(self) -> dict[int, CheckpointInfo]:
        """The run's checkpoints by step, without reading their bytes."""
        return {info.step: info for info in list_checkpoints(self.folder)[0]}

    def settings(self, attempt: int) -> dict[str, Any]:
        """Return the settings of one start: the current ones, with the changes of later resumes undone."""
        settings = to_flat(self.config)
        for event in reversed(self.log.of_kind("resume")):
            if event["attempt"] > attempt:
                undone = {name: change[0] for name, change in event.get("changes", {}).items()}
                settings |= {name: value for name, value in undone.items() if name in settings}
        return settings

    def record(self, attempt: int) -> dict[str, Any]:
        """Return what a start recorded about itself (environment, data, versions); {} if no record is left."""
        records = [
            history.read_json(self.folder / "run.json") or {},
            *(info.manifest for info in self.checkpoints.values()),
        ]
        return next((record for record in records if record.get("attempt") == attempt), {})

    def with_data(self, config: Config) -> Config:
        """Return settings of this run with its data where `data_dir` says; without it, where they were.

        Raises: DataError if they are gone, or not there; ConfigError for a fine-tuned run.
        """
        if not self.data_dir:
            require_folders(config, "--data_dir")
            return config
        if config.tuning.instructions is not None:
            raise ConfigError("--data_dir: the run was fine-tuned on --instructions; omit it")
        words = normal_words("data_dir", self.data_dir, paths.from_working_directory)
        config = override(config, {"data_dir": words})
        for folder in missing_folders(config):
            raise DataError(
                f"--data_dir {folder}: no such folder; say where the run's data are now "
                f"(with a weight only if several)"
            )
        return config

    def require_same_data(self, data: TokenData, trained_on: str) -> None:
        """Compare the data that `data_dir` gives with the fingerprint that the run recorded.

        Raises: DataError.
        """
        if data.fingerprint != trained_on:
            raise DataError(
                f"--data_dir {' '.join(self.data_dir)}: not the data that {self.folder.name} was trained on "
                f"(fingerprint {data.fingerprint[:12]}, the run's is {trained_on[:12]}); give those, in a mixture "
                f"with the same weights"
            )


@dataclass(frozen=True)
class Documents:
    """Where documents end; they are numbered from 1 through all shards, and one may continue in the next shard.

    Number 0 are the tokens before the first end of text, where it precedes each document.
    """

    ends: tuple[np.ndarray, ...]  # of each shard: places of its ends of text, in tokens
    first: tuple[int, ...]  # the number of each shard's first target

    def of_targets(self, shard: int, offset: int, length: int) -> np.ndarray:
        """Return the document of each of the targets of a window at (shard, offset), (length,) int64.

        As in validation, an end of text that is a target belongs to the document that it ends.
        """
        places = np.arange(offset + 1, offset + 1 + length)
        return self.first[shard] + np.searchsorted(self.ends[shard], places)


def find_documents(data: TokenData, *, shards: int | None = None) -> Documents | None:
    """Read the training tokens up to shard number `shards`, default all; None if nothing marks the documents.

    Raises: DataError if a shard is gone or shorter than it was.
    """
    ends: list[np.ndarray] = []
    first: list[int] = []
    before = 0
    for source in data.by_source():
        mark = source.end_of_text
        chosen = source.splits["train"]
        if shards is not None:
            chosen = chosen[: max(0, shards - len(ends))]
        for shard in chosen:
            places = document_marks(shard, mark.id)
            is_before = shard.index is None and mark.place == "before"
            ends.append(places)
            first.append(before + (0 if is_before else 1))
            before += len(places)
    return Documents(tuple(ends), tuple(first)) if before else None


@dataclass(frozen=True)
class StepTokens:
    """The global batch of one optimizer step."""

    step: int
    epoch: int
    first_sample: int
    windows: np.ndarray  # (S, T + 1) of the ids' type, in sample order; targets are windows[:, 1:]
    places: tuple[str, ...]  # of each window: shard and token offset, or row
    hash: str
    data: TokenData
    shards: np.ndarray  # of each window: number of its shard and token offset there, both (S,)
    offsets: np.ndarray

    def unpadded(self) -> list[np.ndarray]:
        """Return the ids of each window after its first, int64; of a row of fine-tuning without all its padding."""
        rows = list(self.windows[:, 1:].astype(np.int64))
        if not _in_memory(self.data) or self.data.tokenizer is None:
            return rows
        end = self.data.tokenizer.end_of_text
        return [row[: np.flatnonzero(row != end).max(initial=-1) + 2] for row in rows]  # one end

    def documents(self) -> list[np.ndarray]:
        """Return the document of each target, (T,) for each window; [] where nothing marks documents.

        Reads the training tokens up to the last shard of these windows.
        """
        last = int(self.shards.max()) + 1
        if _in_memory(self.data) or (known := find_documents(self.data, shards=last)) is None:
            return []
        rows = zip(self.shards.tolist(), self.offsets.tolist(), strict=True)
        return [known.of_targets(*row, self.windows.shape[1] - 1) for row in rows]


def tokens_of_step(run: RecordedRun, step: int) -> StepTokens:
    """Return what update number `step` of a run trained on.

    Raises: ConfigError if the run has not taken that step; DataError if the data has changed since.
    """
    log, run_dir = run.log, run.folder
    event, numbers = log.step(step), log.numbers
    if event is None:
        taken = (
            f"it has {fmt.steps(numbers[0], numbers[-1])}" if len(numbers) else "it has taken none"
        )
        raise ConfigError(f"{run_dir}: no step {step}; {taken}")
    begin = log.begin_of(event["attempt"])
    if begin is None or "tokens_per_step" not in begin:
        raise ConfigError(
            f"{run_dir}: metrics.jsonl does not record how start {event['attempt']} began"
        )
    config = override(run.config, run.settings(event["attempt"]))
    samples = begin["tokens_per_step"] // config.model.context_length
    tokenizer = history.read_tokenizer(run_dir)
    data = run.recipe.open_data(run.with_data(config), tokenizer)
    recorded = run.record(event["attempt"]).get("data_fingerprint")
    if run.data_dir and recorded is not None:
        run.require_same_data(data, recorded)
    order = training_order(data, config, version=begin.get("order_version", 1))
    first = event["first_sample"]
    numbers = np.arange(first, first + samples)
    chosen, offsets = order.locate(numbers)
    windows, places = _read_windows(data, config, chosen, offsets)
    names = [data.splits["train"][shard].path.name for shard in chosen.tolist()]
    if isinstance(order, Mixture):
        sources = order.divide(numbers)[0].tolist()
        names = [f"{order.names[s]}, {name}" for s, name in zip(sources, names, strict=True)]
    digest = hash_windows(windows)
    if digest != event["batch_hash"]:
        raise DataError(
            f"step {step} of {run_dir.name} trained on other tokens than {data.folder} holds now "
            f"(hash {event['batch_hash'][:12]}, now {digest[:12]}); restore the data that it was trained on"
        )
    where = tuple(" ".join(both) for both in zip(names, places, strict=True))
    return StepTokens(
        step=step,
        epoch=event["epoch"],
        first_sample=first,
        windows=windows,
        places=where,
        hash=digest,
        data=data,
        shards=chosen,
        offsets=offsets,
    )


def _in_memory(data: TokenData) -> Any:
    """Return {split: rows} of data that are no shards on disk, as fine-tuning builds them; else None."""
    return getattr(data, "rows", None)


def _read_windows(
    data: TokenData, config: Config, shards: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Return windows, (S, T + 1), and the place of each within its shard."""
    T = config.model.context_length
    if in_memory := _in_memory(data):
        rows = offsets // T
        return in_memory["train"].ids[rows], [f"row {number}" for number in rows.tolist()]
    reader = WindowReader(data.splits["train"], context_length=T, id_limit=config.model.id_limit)
    windows = reader.read(shards, offsets)
    reader.close()
    return windows, [f"from token {offset}" for offset in offsets.tolist()]
