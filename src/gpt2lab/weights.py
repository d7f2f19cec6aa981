"""The weights that a target names, as a model of ours on the CPU."""

from __future__ import annotations

from gpt2lab.checkpoint import load_model
from gpt2lab.hf import load_hf
from gpt2lab.model import GPT, empty_model
from gpt2lab.target import Target


def load_weights(target: Target) -> GPT:
    """Return the model of a checkpoint or of a Hugging Face folder, fp32.

    Raises: CheckpointError naming the file.
    """
    if target.checkpoint is None:
        return load_hf(target.folder)
    model = empty_model(target.model_config())
    load_model(target.folder, model)
    return model
