"""Tensors and state, in and out of a checkpoint folder.

One format for any number of processes, keyed by parameter name. safetensors serialises, so nothing loaded can run
code; hashing, flushing and the commit are manifest.py's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from gpt2lab.checkpoints import manifest as manifests
from gpt2lab.errors import CheckpointError
from gpt2lab.state import TrainState

MODEL, OPTIM, STATE = "model.safetensors", "optim.safetensors", "state.json"
Optimizers = list[torch.optim.Optimizer]


def save(
    run_dir: Path,
    *,
    kind: str,
    model: nn.Module,
    optimizers: Optimizers,
    state: TrainState,
    rng_states: list[dict[str, Any]],
    facts: dict[str, Any],
) -> Path:
    """Commit one checkpoint of `state.step` and return its folder. Called on the first process only.

    `facts` go into the manifest (config, data fingerprint, versions ...). A step that is committed already is left
    as it is.

    Raises: OSError; nothing then has changed on disk.
    """
    folder = run_dir / manifests.folder_name(state.step)
    if folder.exists():
        return folder
    with manifests.staged(run_dir, state.step) as staging:
        staging.add(MODEL, safetensors.torch.save(model_tensors(model)))
        staging.add(OPTIM, safetensors.torch.save(optimizer_tensors(model, optimizers)))
        staging.add(
            STATE,
            json.dumps({"state": state.to_dict(), "rng": rng_states}, allow_nan=False).encode(),
        )
        staging.seal(
            {
                **facts,
                "step": state.step,
                "kind": kind,
                "tokens": state.tokens,
                "val_loss": state.val_loss,
                "best_val_loss": state.best_val_loss,
                "created": time.time(),
            }
        )
    return folder


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return {parameter name: fp32 tensor on the CPU}, sorted: a function of the parameters alone."""
    named = sorted(model.named_parameters())
    return {
        name: parameter.detach().to("cpu", torch.float32).contiguous() for name, parameter in named
    }


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """Return {"parameter name/key": tensor on the CPU}, sorted, e.g. "wte.weight/exp_avg"."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {
        f"{names[id(parameter)]}/{key}": value.detach().cpu().contiguous()
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    return dict(sorted(tensors.items()))


def num_bytes(model: nn.Module, optimizers: Optimizers) -> int:
    """Return the tensor bytes of a checkpoint: parameters in fp32 and the optimizers' state, as it is now."""
    moments = [
        value.numel() * value.element_size()
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
    ]
    return 4 * sum(parameter.numel() for parameter in model.parameters()) + sum(moments)


def load(
    folder: Path, *, model: nn.Module, optimizers: Optimizers
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Put a verified checkpoint into model and optimizers; return where the run stands, and each rank's generators.

    Names and shapes are compared before anything is copied.

    Raises: CheckpointError naming the file.
    """
    state, rng_states = _load_state(folder / STATE)
    load_model(folder, model)
    _load_optimizers(folder / OPTIM, model, optimizers)
    return state, rng_states


def _load_state(path: Path) -> tuple[TrainState, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_bytes())
        return TrainState.from_dict(content["state"]), list(content["rng"])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a state of gpt2lab ({error!r})") from error


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path, device="cpu")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path}: {error}; every machine of the run must see the same checkpoint folder"
        ) from error


def load_model(folder: Path, model: nn.Module) -> None:
    """Put a verified checkpoint's weights into a model.

    Raises: CheckpointError naming the file.
    """
    path = folder / MODEL
    tensors, parameters = _read(path), dict(model.named_parameters())
    _compare(
        path, {n: t.shape for n, t in tensors.items()}, {n: p.shape for n, p in parameters.items()}
    )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _load_optimizers(path: Path, model: nn.Module, optimizers: Optimizers) -> None:
    tensors, names = (
        _read(path),
        {id(parameter): name for name, parameter in model.named_parameters()},
    )
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        by_name.setdefault(name, {})[key] = tensor
    wanted = {
        names[id(p)]: p
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    moments = {
        name: values["exp_avg"].shape for name, values in by_name.items() if "exp_avg" in values
    }
    _compare(path, moments, {name: p.shape for name, p in wanted.items()})
    for optimizer in optimizers:
        content = (
            optimizer.state_dict()
        )  # group settings are this start's; only the per-parameter state is loaded
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        content["state"] = {index: by_name[name] for index, name in enumerate(order)}
        optimizer.load_state_dict(
            content
        )  # torch places each tensor: a fused AdamW wants `step` on the device


def _compare(path: Path, found: dict[str, torch.Size], wanted: dict[str, torch.Size]) -> None:
    for name in sorted(set(found) | set(wanted)):
        if found.get(name) != wanted.get(name):
            here, there = (tuple(s[name]) if name in s else "nothing" for s in (wanted, found))
            raise CheckpointError(
                f"{path}: {name} is {there}, the model has {here}; another architecture"
            )
