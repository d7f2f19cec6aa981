"""The weights that a target names, as a model of ours on the CPU."""

import torch

from gpt2lab.checkpoint.store import load_model
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.model.gpt import GPT, empty_model
from gpt2lab.model.hf_weights import load_hf
from gpt2lab.model.lora import add_lora, merge_lora
from gpt2lab.runs.console import doing
from gpt2lab.runs.target import Target


def load_weights(target: Target) -> GPT:
    """Return the model of a checkpoint or of a Hugging Face folder, fp32; adapters are merged into the weights.

    Raises: CheckpointError naming the file.
    """
    with doing("loading the weights"):
        if target.checkpoint is None:
            return load_hf(target.folder)
        config = target.checkpoint.config()
        model = empty_model(config.model)
        model.residual_dtype = config.system.residual_dtype
        if config.tuning.lora_r:
            add_lora(model, config.tuning)
        load_model(target.folder, model)
        merge_lora(model)
        return model


def load_initial(target: Target, model: GPT, runtime: Runtime) -> None:
    """Give a fresh model the weights of a target, on every rank; only rank 0 needs the files.

    Where the model's context is shorter, it gets the first positions.

    Raises: CheckpointError on all ranks.
    """

    def read() -> None:
        tensors = dict(load_weights(target).named_parameters())
        for name, parameter in model.named_parameters():
            tensor = tensors[name]
            parameter.copy_(tensor[: len(parameter)] if name == "wpe.weight" else tensor)

    with torch.no_grad():
        runtime.on_rank_zero(read)
        runtime.broadcast(list(model.parameters()))
