"""What a name means: a run, a checkpoint, or a Hugging Face GPT-2 on disk or on the Hub. No torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.config.schema import ModelConfig
from gpt2lab.data.hub import is_offline
from gpt2lab.errors import CheckpointError, ConfigError, first_line
from gpt2lab.files import JsonFile
from gpt2lab.model.hf_config import (
    HF_CONFIG,
    HF_INDEX,
    HF_SHARDS,
    HF_WEIGHTS,
    PADDED_VOCABULARY,
    read_hf_config,
    tokenizer_is_unknown,
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
_OF_THE_HUB = r"gpt2(-medium|-large|-xl)?|[\w-][\w.-]*/(?!step_)[\w.-]+|hf:[\w.-]+(/[\w.-]+)?"
_LATEST = "latest"  # the run whose checkpoint was committed last, as for --resume
_AT = re.compile(r"@([0-9]{1,18}|best|latest)\Z")
_SHOWN = 5  # runs that an error names


@dataclass(frozen=True)
class Target:
    """Verified weights on disk."""

    name: str  # as it was typed, its run in full
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
        if found is not None or tokenizer_is_unknown(self.folder):
            return found
        return GPT2 if self.model_config().vocab_size <= PADDED_VOCABULARY else None


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
        return Target(name, _download(name), None)
    name = full_name(name, checkpoint_dir)
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
    if is_model(folder):
        return Target(name, folder, None)
    raise CheckpointError(
        f"{folder}: neither a run, a checkpoint nor a Hugging Face GPT-2, whose {HF_CONFIG} has a model_type"
        + "; nanoGPT's ckpt.pt: gpt2lab runs import FILE" * (folder / "ckpt.pt").is_file()
    )


def find_run(run: str, checkpoint_dir: Path | None = None, *, or_checkpoint: bool = False) -> Path:
    """Return the folder of a run, given by its name in `checkpoint_dir` (default checkpoints/) or by a path.

    Raises: ConfigError if there is no such folder, or it is a checkpoint's and not `or_checkpoint`.
    """
    folder = find_folder(run, paths.runs_folder(checkpoint_dir), hub=False)
    assert folder is not None  # no name on the Hub
    if not or_checkpoint and (folder / manifest.MANIFEST).exists():
        of_run = paths.display_path(folder.absolute().parent)
        raise ConfigError(f"{run}: a checkpoint, not a run; give {of_run}")
    return folder


def find_folder(name: str, checkpoint_dir: Path, *, hub: bool = True) -> Path | None:
    """Return the folder that a run's name or a path means, or None if it is a name on the Hub.

    Raises: ConfigError if it is neither, or the beginning of several runs' names.
    """
    full = full_name(name, checkpoint_dir, hub=hub)
    folder = catalog.find_folder(full, checkpoint_dir) if full[:3] != HUB else None
    if folder is None and name.endswith(".pt"):
        raise ConfigError(f"{name}: no folder; a file of nanoGPT: gpt2lab runs import {name}")
    if folder is None and not (hub and re.fullmatch(_OF_THE_HUB, name)):
        also = f" (a model of the Hub is {HUB}NAME)" if hub else ""
        raise ConfigError(
            f"{name}: no run of this name in {paths.display_path(checkpoint_dir)}, and no such folder{also}; "
            f"{_instead(full, checkpoint_dir)}"
        )
    return folder


def full_name(name: str, checkpoint_dir: Path, *, hub: bool = True) -> str:
    """Return a name with its run in full: `latest`, and the beginning of a single run's name, mean that run.

    RUN@250 means RUN/step_00000250, as for --branch_from, and RUN@best the folder that is labelled so. What is there
    under the name itself keeps its meaning, and so does, with `hub`, a name on the Hub.

    Raises: ConfigError if several names begin so, or no run has a checkpoint yet.
    """
    if catalog.find_folder(name, checkpoint_dir) is None and (at := _AT.search(name)):
        run = full_name(name[: at.start()], checkpoint_dir, hub=hub)
        return run + _step_of(at[1], catalog.find_folder(run, checkpoint_dir))
    run, slash, rest = name.partition("/")
    is_path = run in ("", ".", "..", "~") or catalog.find_folder(name, checkpoint_dir) is not None
    if is_path or (hub and re.fullmatch(_OF_THE_HUB, run)):
        return name
    names = _names(checkpoint_dir)
    if run == _LATEST and run not in names:
        if (newest := catalog.newest_run(checkpoint_dir)) is None:
            raise ConfigError(f"{name}: no run in {checkpoint_dir} has a checkpoint yet")
        return newest.name + slash + rest
    found = [run] if run in names else [one for one in names if one.startswith(run)]
    if len(found) > 1:
        raise ConfigError(f"{name}: {fmt.number_of(len(found), 'run')} begin so: {_list(found)}")
    return (found[0] if found else run) + slash + rest


def _step_of(at: str, run_dir: Path | None) -> str:
    """Return what follows a run's name for its checkpoint of a step, for its best one, or for its newest."""
    if at == _LATEST:
        return ""
    if at.isdecimal():
        return f"/{manifest.folder_name(int(at))}"
    labelled = catalog.read_labels(run_dir).get(at, "") if run_dir else ""
    return f"/{labelled if manifest.is_folder_name(labelled) else at}"


def _names(checkpoint_dir: Path) -> list[str]:
    return [run.name for run in catalog.run_folders(checkpoint_dir) if is_run(run)]


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _instead(name: str, checkpoint_dir: Path) -> str:
    """Return what may have been meant: the run whose name, or its beginning, is closest; else what there is."""
    names, run = _names(checkpoint_dir), name.partition("/")[0]
    if run in names:
        steps = [info.path.name for info in catalog.list_checkpoints(checkpoint_dir / run)[0]]
        return f"{run} has {_list(steps) or 'no checkpoint yet'}"
    if (close := closest_run(run, names)) is not None:
        return f"did you mean {close}?"
    return f"there are: {_list(names)}" if names else "there are no runs"


def closest_run(name: str, names: list[str]) -> str | None:
    """Return the run whose name, or its beginning, is closest to a misspelt name; None if none is close."""
    beginnings = {one[: len(name)]: one for one in reversed(names)}
    close = fmt.closest(name, names) or fmt.closest(name, beginnings)
    return beginnings.get(close, close) if close else None


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


def is_model(folder: Path) -> bool:
    """Tell whether a folder is a Hugging Face model's."""
    file = JsonFile(folder / HF_CONFIG, CheckpointError, follow=True)
    return file.path.is_file() and "model_type" in file.read()


def _download(name: str) -> Path:
    offline = is_offline()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name.removeprefix(HUB), allow_patterns=_DOWNLOADED))
    except Exception as error:  # of any type, from a bad name to no network
        hub = f"not on the Hugging Face Hub ({first_line(error)})"
        if offline:
            hub = (
                "not among the models downloaded before, and the Hugging Face Hub cannot be reached"
            )
        raise CheckpointError(f"{name}: {hub}") from error


def was_tuned(target: Target) -> bool:
    """Tell whether weights were fine-tuned: by the run's settings, or by the chat template of an export."""
    if target.checkpoint is not None:
        return target.checkpoint.manifest["config"].get("instructions") is not None
    try:
        settings = JsonFile(target.folder / "tokenizer_config.json", CheckpointError).read()
        return bool(settings["chat_template"] == chat_template.jinja(settings["eos_token"]))
    except (CheckpointError, KeyError, TypeError):
        return False
