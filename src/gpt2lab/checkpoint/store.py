"""Tensors and state, in and out of a checkpoint folder.

One format for any number of processes, keyed by parameter name. safetensors serialises, so nothing loaded can run
code; hashing, flushing and the commit are manifest.py's.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from gpt2lab.checkpoint import manifest as manifests
from gpt2lab.checkpoint.state import TrainState
from gpt2lab.distributed.sharding import cut_like, is_spread, whole
from gpt2lab.errors import CheckpointError

MODEL, OPTIM, STATE = "model.safetensors", "optim.safetensors", "state.json"
Optimizers = list[torch.optim.Optimizer]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Content:
    """The tensors of one checkpoint, whole and on the CPU, sorted by name."""

    model: Tensors  # "wte.weight"
    optimizer: Tensors  # "wte.weight/exp_avg"


def collect(model: nn.Module, optimizers: Optimizers, *, keep: bool) -> Content:
    """Return what a checkpoint holds, whatever is spread over processes put together; all of them call it together.

    Without `keep` a process gives its pieces and gets nothing.
    """
    return Content(
        _gather({name: parameter.detach() for name, parameter in model.named_parameters()}, keep),
        _gather(_optimizer_tensors(model, optimizers), keep),
    )


def _gather(named: Tensors, keep: bool) -> Tensors:
    found: Tensors = {}
    for name in sorted(named):
        tensor = whole(named[name])
        if keep:
            found[name] = tensor.cpu().contiguous()
    return found


def is_spread_out(model: nn.Module, optimizers: Optimizers) -> bool:
    """Tell whether this process alone cannot make a checkpoint."""
    held = [parameter for optimizer in optimizers for parameter in _parameters(optimizer)]
    return any(is_spread(tensor) for tensor in [*model.parameters(), *held])


def save(
    run_dir: Path,
    *,
    kind: str,
    content: Content,
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
        staging.add(MODEL, safetensors.torch.save(content.model))
        staging.add(OPTIM, safetensors.torch.save(content.optimizer))
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


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Name what an optimizer updates, in its order; what is a piece of a parameter has its name from the group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        name
        for group in optimizer.param_groups
        for name in group.get("param_names") or [names[id(p)] for p in group["params"]]
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> Tensors:
    """Return {"parameter name/key": tensor or this process's piece of it}."""
    return {
        f"{name}/{key}": value.detach()
        for optimizer in optimizers
        for name, parameter in zip(
            _parameter_names(model, optimizer), _parameters(optimizer), strict=True
        )
        for key, value in optimizer.state.get(parameter, {}).items()
    }


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
    folder: Path, *, model: nn.Module, optimizers: Optimizers, other_optimizer: bool = False
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Put a verified checkpoint into model and optimizers; return where the run stands, and each rank's generators.

    Names and shapes are compared before anything is copied. With `other_optimizer` the saved state belongs to another
    kind of optimizer and is left out: this one begins with none.

    Raises: CheckpointError naming the file.
    """
    state, rng_states = _load_state(folder / STATE)
    load_model(folder, model)
    if not other_optimizer:
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
            parameter.copy_(cut_like(tensors[name], parameter))


def _load_optimizers(path: Path, model: nn.Module, optimizers: Optimizers) -> None:
    by_name: dict[str, Tensors] = {}
    for full_name, tensor in _read(path).items():
        name, _, key = full_name.rpartition("/")
        by_name.setdefault(name, {})[key] = tensor
    orders = [_parameter_names(model, optimizer) for optimizer in optimizers]
    wanted = {
        name: parameter.shape
        for order, optimizer in zip(orders, optimizers, strict=True)
        for name, parameter in zip(order, _parameters(optimizer), strict=True)
    }
    moments = {
        name: values[key].shape
        for name, values in by_name.items()
        for key in ("exp_avg", "momentum_buffer")  # AdamW's, Muon's
        if key in values
    }
    _compare(path, moments, wanted)
    for order, optimizer in zip(orders, optimizers, strict=True):
        # Group settings are this start's; only the per-parameter state is loaded.
        content = optimizer.state_dict()
        content["state"] = {
            index: {key: cut_like(tensor, parameter) for key, tensor in by_name[name].items()}
            for index, (name, parameter) in enumerate(
                zip(order, _parameters(optimizer), strict=True)
            )
        }
        # torch places each tensor: a fused AdamW wants `step` on the device
        optimizer.load_state_dict(content)


def _compare(path: Path, found: dict[str, torch.Size], wanted: dict[str, torch.Size]) -> None:
    for name in sorted(set(found) | set(wanted)):
        if found.get(name) != wanted.get(name):
            here, there = (tuple(s[name]) if name in s else "nothing" for s in (wanted, found))
            raise CheckpointError(
                f"{path}: {name} is {there}, the model has {here}; another architecture"
            )
