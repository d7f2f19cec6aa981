"""Which weights a name means: a run, a checkpoint, or a Hugging Face GPT-2 on disk or on the Hub. No torch."""

from __future__ import annotations

import os
import re
import socket
import sys
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

from gpt2lab import paths
from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.config.schema import ModelConfig
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

    Raises: CheckpointError.
    """
    folder = find_folder(name, checkpoint_dir)
    if folder is None:
        return Target(name, _download(name, checkpoint_dir), None)
    if (folder / manifest.MANIFEST).exists():
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
    file = JsonFile(folder / HF_CONFIG, CheckpointError)
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
            f"{name}: no such run or folder, and {hub}; {paths.script('status')} lists the runs"
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


_SECONDS = 5.0  # to wait for a connection, over all addresses
_VARIABLE = "HF_HUB_OFFLINE"
_YES = {"1", "ON", "YES", "TRUE"}
_PORTS = {"http": 80, "https": 443}
_READ_AT_IMPORT = ("huggingface_hub.constants", "datasets.config")  # the variable

_users_value: str | None = None  # of the variable, while it is ours
_is_ours = False


def is_offline() -> bool:
    """Tell whether the Hub cannot be reached now; its libraries then use only their cache, until it can be reached.

    Without it the libraries would retry for most of a minute.
    """
    if not _is_ours and os.environ.get(_VARIABLE, "").upper() in _YES:
        return True
    offline = not _accepts_connections()
    if offline != _is_ours:
        _tell_libraries(offline)
    return offline


def _tell_libraries(offline: bool) -> None:
    """Set the libraries' variable, or restore the user's value, also in libraries that have read it."""
    global _is_ours, _users_value
    if offline:
        _users_value = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = "1"
    elif _users_value is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = _users_value
    _is_ours = offline
    for name in _READ_AT_IMPORT:
        if (module := sys.modules.get(name)) is not None:
            module.HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]


def _accepts_connections() -> bool:
    """Tell whether the Hub, or the proxy that leads to it, accepts a connection."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = urllib.request.getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(hub.hostname or ""):
        hub = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = hub.port or _PORTS.get(hub.scheme, 1080)  # of SOCKS
    except ValueError:
        return True  # no port: the libraries report what is wrong with the address
    deadline = monotonic() + _SECONDS
    try:
        places = socket.getaddrinfo(hub.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    turns: Counter[int] = Counter()
    by_turn = []
    for family, *_, address in places:
        by_turn.append((turns[family], (str(address[0]), port)))
        turns[family] += 1
    for _, address in sorted(by_turn, key=lambda place: place[0]):  # IPv4 and IPv6 in turn
        left = deadline - monotonic()
        if left <= 0:
            break
        try:
            socket.create_connection(
                address, timeout=left / 2
            ).close()  # leaves time for the other addresses
        except OSError:
            continue
        return True
    return False
