"""Which weights a name means: a run, a checkpoint, or a Hugging Face GPT-2 on disk or on the Hub. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.config.schema import ModelConfig
from gpt2lab.data.hub import is_offline
from gpt2lab.errors import CheckpointError, first_line
from gpt2lab.files import JsonFile
from gpt2lab.model.hf_config import (
    HF_CONFIG,
    HF_INDEX,
    HF_SHARDS,
    HF_WEIGHTS,
    PADDED_VOCABULARY,
    read_hf_config,
)
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.folder import check_entries
from gpt2lab.runs.history import deleted_newest
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import HF_TOKENIZER_FILES, find_in, of_record

_DOWNLOADED = [HF_CONFIG, HF_WEIGHTS, HF_INDEX, HF_SHARDS, *HF_TOKENIZER_FILES]
HUB = "hf:"  # before a name: on the Hugging Face Hub, whatever folders there are


@dataclass(frozen=True)
class Target:
    """Verified weights on disk."""

    name: str  # as it was typed
    folder: Path
    checkpoint: CheckpointInfo | None  # None: a Hugging Face folder
    warnings: tuple[str, ...] = ()

    def model_config(self) -> ModelConfig:
        """Return the shape of the weights.

        Raises: CheckpointError if it is not a supported architecture.
        """
        if self.checkpoint is None:
            return read_hf_config(self.folder)
        return self.checkpoint.config().model

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that the weights were trained with; None if it is not known.

        Raises: DataError if the folder's is damaged.
        """
        if self.checkpoint is not None:
            return tokenizer_of(self.checkpoint)
        found = find_in(self.folder)
        if found is None and self.model_config().vocab_size <= PADDED_VOCABULARY:
            return GPT2
        return found


def tokenizer_of(checkpoint: CheckpointInfo) -> Tokenizer | None:
    """Return the tokenizer that a checkpoint carries; GPT-2's for those that are older than other tokenizers.

    Raises: DataError if its files are missing or another's.
    """
    record = checkpoint.manifest.get("tokenizer", GPT2.record())
    return of_record(record, checkpoint.path, manifest.MANIFEST)


def find_target(name: str, checkpoint_dir: Path) -> Target:
    """Return what `name` means: a run in `checkpoint_dir`, else a folder, else a model on the Hugging Face Hub.

    A run means its newest checkpoint whose every byte verifies; `hf:NAME` always means the Hub.

    Raises: CheckpointError; ConfigError, see `check_entries`.
    """
    folder = find_folder(name, checkpoint_dir)
    if folder is None:
        return Target(name, _download(name, checkpoint_dir), None)
    is_checkpoint = (folder / manifest.MANIFEST).exists()
    if is_run(run_dir := folder.parent if is_checkpoint else folder):
        check_entries(run_dir)
    if is_checkpoint:
        return Target(name, folder, catalog.open_checkpoint(folder))
    if is_run(folder):
        info, warnings = catalog.newest_valid(folder, set_aside=False)
        warnings += deleted_newest(folder, info)
        if info is None:
            raise CheckpointError(warnings[0] if warnings else f"{folder}: no checkpoint yet")
        return Target(name, info.path, info, tuple(warnings))
    if _is_hf(folder):
        return Target(name, folder, None)
    raise CheckpointError(
        f"{folder}: neither a run, a checkpoint nor a Hugging Face GPT-2, whose {HF_CONFIG} has a model_type"
    )


def find_folder(name: str, checkpoint_dir: Path) -> Path | None:
    """Return the folder that a run's name or a path means, or None if it can only be a name on the Hub.

    Raises: CheckpointError if it cannot be either.
    """
    folder = None if name.startswith(HUB) else catalog.find_folder(name, checkpoint_dir)
    if folder is not None:
        return folder
    if re.fullmatch(rf"({HUB})?[\w.-]+(/[\w.-]+)?", name) is None:
        raise CheckpointError(f"{name}: no such folder, nor a run in {checkpoint_dir}")
    return None


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a run's."""
    return catalog.has_checkpoints(folder) or (folder / METRICS).exists()


def run_and_step(folder: Path) -> tuple[Path, int | None] | None:
    """Return the run that a folder is, or of which it is a checkpoint, with that step; None if it is neither."""
    if is_run(folder):
        return folder, None
    if not (folder / manifest.MANIFEST).exists():
        return None
    return folder.parent, int(manifest.read_manifest(folder)["step"])


def _is_hf(folder: Path) -> bool:
    file = JsonFile(folder / HF_CONFIG, CheckpointError, follow=True)
    return file.path.is_file() and "model_type" in file.read()


def _download(name: str, checkpoint_dir: Path) -> Path:
    offline = is_offline()
    from huggingface_hub import snapshot_download

    try:
        repository = name.removeprefix(HUB)
        return Path(snapshot_download(repository, allow_patterns=_DOWNLOADED))
    except Exception as error:  # of any type, from a bad name to no network
        hub = f"not on the Hugging Face Hub ({first_line(error)})"
        if offline:
            hub = (
                "not among the models downloaded before, and the Hugging Face Hub cannot be reached"
            )
        if name.startswith(HUB):
            raise CheckpointError(f"{name}: {hub}") from error
        if similar := catalog.similar_run(name, checkpoint_dir):
            raise CheckpointError(f"{name}: no such run or folder{similar}") from error
        if name.startswith("gpt2") or "/" in name:
            hub += f"; of the Hub it is {HUB}{name}"
        raise CheckpointError(
            f"{name}: no such run or folder, and {hub}; gpt2lab status lists the runs"
        ) from error


def was_tuned(target: Target) -> bool:
    """Tell whether weights were fine-tuned: by the run's settings, or by the chat template of an export."""
    if target.checkpoint is not None:
        return target.checkpoint.manifest["config"].get("instructions") is not None
    try:
        settings = JsonFile(target.folder / "tokenizer_config.json", CheckpointError).read()
        return bool(settings["chat_template"] == chat_template.jinja(settings["eos_token"]))
    except (CheckpointError, KeyError, TypeError):
        return False
