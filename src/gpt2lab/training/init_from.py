"""`--init_from`: start a fresh run from the weights of another model instead of random ones. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from gpt2lab.checkpoint import catalog
from gpt2lab.config.presets import PRESETS, preset
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config, ModelConfig, ModelName
from gpt2lab.config.settings import ARCHITECTURE, options_of, override
from gpt2lab.errors import CheckpointError, ConfigError
from gpt2lab.files import sha256_of
from gpt2lab.model.hf_config import HF_WEIGHTS, weight_files
from gpt2lab.runs.target import Target, find_target


@dataclass(frozen=True)
class InitialWeights:
    """Which weights a run begins with."""

    target: Target
    sha256: str  # of their file; for shards of the shards' digests, in the order of names

    def record(self) -> dict[str, Any]:
        """Return the record in run.json and every manifest."""
        checkpoint = self.target.checkpoint
        return {
            "init_from": self.target.name,
            "folder": str(self.target.folder),
            "step": checkpoint.step if checkpoint else None,
            "sha256": self.sha256,
        }


# Words of nanoGPT, unless a run or a folder has the name.
_OF_NANOGPT = {"scratch": "leave it out", "resume": "here it is --resume latest"}


def begin_from(request: RunRequest) -> tuple[Config, InitialWeights]:
    """Return the settings of a fresh start with the source's architecture, and the source.

    A smaller context is allowed: the first positions are kept. Rates, batch and data are those of the preset of this
    shape, where none was chosen.

    Raises: CheckpointError if there is no such model; ConfigError if another architecture was chosen.
    """
    asked = request.config
    name, runs = asked.init.init_from, asked.checkpoint.checkpoint_dir
    assert name is not None
    if name in _OF_NANOGPT and catalog.find_folder(name, runs) is None:
        raise ConfigError(f"--init_from {name}: {_OF_NANOGPT[name]}")
    target = find_target(name, runs)
    source = target.model_config()
    tokenizer = target.tokenizer() if request.recipe == "finetune" else None
    if tokenizer is not None and source.num_tokens < tokenizer.size <= source.vocab_size:
        # Answers end with the end of text, which nanoGPT's characters lack: its row becomes one of text.
        source = dataclasses.replace(source, num_tokens=tokenizer.size)
    given = set(request.chosen)
    if "model" in given:
        given |= set(PRESETS[asked.model.model])
        config = asked
    else:
        optimizer = asked.optim.optimizer if "optimizer" in given else None
        config = request.over(preset(_preset_of(target, source), optimizer=optimizer))
    config = override(config, {n: getattr(source, n) for n in ARCHITECTURE if n not in given})
    for field in ARCHITECTURE:
        here, there = getattr(config.model, field), getattr(source, field)
        if here != there and not (field == "context_length" and here < there):
            limit = " at most" if field == "context_length" else ""
            raise ConfigError(
                f"{field} {here} does not fit --init_from {name}, which has{limit} {there}; leave out --"
                f"{field if field in request.chosen else 'model'}"
            )
    return config, InitialWeights(target, _hash(target))


def _preset_of(target: Target, source: ModelConfig) -> ModelName:
    """Return the preset that a source was trained with, or that has its shape."""
    if target.checkpoint is not None:
        return source.model
    shape = {field: getattr(source, field) for field in ("n_layer", "n_head", "n_embd")}
    names = [name for name, values in PRESETS.items() if shape.items() <= values.items()]
    same = [name for name in names if options_of(preset(name).model) == options_of(source)]
    return [*same, *names, "gpt2"][0]


def _hash(target: Target) -> str:
    if target.checkpoint is not None:
        return str(target.checkpoint.manifest["files"][HF_WEIGHTS]["sha256"])  # the same name
    try:
        digest, *others = (sha256_of(path) for path in weight_files(target.folder))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    return hashlib.sha256("".join([digest, *others]).encode()).hexdigest() if others else digest
