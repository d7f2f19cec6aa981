"""Read the .pt files of nanoGPT, of build-nanogpt and of this program's predecessor as a GPT-2 of gpt2lab.

All three pickle a dict with `model` and mostly `optimizer`. Parameter names and shapes are GPT-2's with `transformer.`
in front; matrices are stored as nn.Linear stores them. torch.load reads them with weights_only, which runs no code.
Files that pickle an object for their settings need `trust`; even then numpy's array constructors are all that may be
called besides torch's own list.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2lab.config.schema import ModelConfig
from gpt2lab.errors import CheckpointError, first_line
from gpt2lab.files import open_regular
from gpt2lab.model.gpt import empty_model
from gpt2lab.model.hf_config import our_name

_MOMENTS = ("exp_avg", "exp_avg_sq")
_WRAPPERS = ("module.", "_orig_mod.")  # DDP's and torch.compile's
_HEADS = ("n_head", "num_heads")
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_SCALAR: Any = np.float64(0).__reduce__()[0]
_ARRAYS: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": _RECONSTRUCT,  # before numpy 2
    "numpy.core.multiarray.scalar": _SCALAR,
    "numpy._core.multiarray._reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray.scalar": _SCALAR,
}
_WRITERS = ("__main__", "model", "train", "train_improved", "argparse", "pathlib")


@dataclass(frozen=True)
class Foreign:
    """What a foreign file holds that a run of ours can go on from."""

    model: ModelConfig
    weights: dict[str, torch.Tensor]  # by our names, fp32
    moments: dict[str, dict[str, torch.Tensor]] | None  # AdamW's, by our names
    step: int  # updates that the weights have seen
    notes: tuple[str, ...]


def read_foreign(path: Path, *, trust: bool) -> Foreign:
    """Read and check a file; the weights stay unchanged, nothing is guessed.

    Raises: CheckpointError naming what is missing or what it is instead.
    """
    content = _load(path, trust=trust)
    if not isinstance(content, dict) or not isinstance(content.get("model"), Mapping):
        raise CheckpointError(
            f"{path}: no `model` with weights in it; nanoGPT's ckpt.pt and its kin are read"
        )
    weights = _weights(path, content["model"])
    model = _shape(path, weights, _heads(path, content))
    added = _zero_biases(weights, model)
    _compare(path, weights | added, model)
    moments, steps = _moments(path, content.get("optimizer"), weights)
    notes = []
    if added:
        notes.append(
            "trained without biases, nanoGPT's default: they begin at zero, which computes the same"
        )
        if moments is not None and steps is not None:
            moments |= {
                name: {
                    "step": torch.tensor(float(steps)),
                    **{key: torch.zeros_like(zero) for key in _MOMENTS},
                }
                for name, zero in added.items()
            }
    if "model_args" in content:
        notes.append(
            "nanoGPT computes the exact GELU, this model GPT-2's tanh form: the loss moves a little at first"
        )
    return Foreign(model, weights | added, moments, _step(path, content, steps), tuple(notes))


def _load(path: Path, *, trust: bool) -> Any:
    try:
        open_regular(path).close()
        with torch.serialization.safe_globals(_stand_ins(path) if trust else []):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        if trust:
            raise CheckpointError(f"{path}: {str(error).splitlines()[0]}") from error
        raise CheckpointError(
            f"{path}: holds pickled objects, which can run code; if you know who wrote it, add --trust"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = first_line(error)
        raise CheckpointError(f"{path}: not a file that torch.save wrote ({reason})") from error


class _StandIn:
    """Replaces a class that only the file's writer has; keeps its fields and runs none of its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _stand_ins(path: Path) -> list[Any]:
    """Return what a trusted file may call besides torch's own list: numpy's arrays, and stand-ins for settings.

    Raises: CheckpointError if the file names anything else; OSError.
    """
    if not zipfile.is_zipfile(path):  # torch's format before 1.6 does not list what it calls
        return []
    found: list[Any] = [type(np.dtype(code)) for code in "?bBhHiIlLqQefdSU"]
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(path):
        if name in _ARRAYS:
            found.append((_ARRAYS[name], name))
        elif name.partition(".")[0] in _WRITERS:
            found.append((_StandIn, name))
        else:
            raise CheckpointError(f"{path}: it would call {name}, which no checkpoint needs")
    return found


def _weights(path: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return {our name: fp32 tensor}, in the file's order."""
    ours: dict[str, torch.Tensor] = {}
    for full_name, tensor in tensors.items():
        name = str(full_name)
        for wrapper in _WRAPPERS:
            name = name.removeprefix(wrapper)
        short = our_name(name)
        if short is None:
            continue
        ours[short] = _as_float(path, str(full_name), tensor)
    head = ours.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, ours.get("wte.weight", head.new_empty(0))):
        raise CheckpointError(
            f"{path}: lm_head.weight differs from wte.weight; only a tied head is supported"
        )
    return ours


def _as_float(path: Path, name: str, tensor: Any) -> torch.Tensor:
    """Return a tensor in fp32; a tiny file can claim terabytes of one value repeated, which is rejected."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: {name} is no tensor")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{path}: {name} claims more values than the file holds")
    return tensor.float().contiguous()


def _heads(path: Path, content: dict[str, Any]) -> int:
    """Return the number of heads, the one part of the shape that no tensor shows."""
    for key in ("model_args", "config", "args"):
        found = content.get(key)
        values = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
        for name in _HEADS:
            if isinstance(values.get(name), int):
                return int(values[name])
    raise CheckpointError(
        f"{path}: no n_head in model_args, config or args; the tensors do not show it"
    )


def _shape(path: Path, weights: dict[str, torch.Tensor], n_head: int) -> ModelConfig:
    for name in ("wte.weight", "wpe.weight"):
        if name not in weights or weights[name].dim() != 2:
            raise CheckpointError(f"{path}: no tensor {name}; not a GPT-2")
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    vocab_size, n_embd = weights["wte.weight"].shape
    if n_head < 1 or n_embd % n_head:
        raise CheckpointError(f"{path}: width {n_embd} is not a multiple of n_head {n_head}")
    return ModelConfig(
        n_layer=len(blocks),
        n_head=n_head,
        n_embd=n_embd,
        context_length=weights["wpe.weight"].size(0),
        vocab_size=vocab_size,
    )


def _zero_biases(weights: dict[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return zeros for the biases of a model that has none at all; one that lacks some is another model."""
    if any(name.endswith(".bias") for name in weights):
        return {}
    wanted = empty_model(model).named_parameters()
    return {name: torch.zeros(p.shape) for name, p in wanted if name.endswith(".bias")}


def _compare(path: Path, weights: dict[str, torch.Tensor], model: ModelConfig) -> None:
    """Reject anything but our model: names, shapes, finite values."""
    wanted = {name: p.shape for name, p in empty_model(model).named_parameters()}
    missing, unknown = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    if missing or unknown:
        problem = f"no tensor {missing[0]}" if missing else f"unknown tensor {unknown[0]}"
        raise CheckpointError(f"{path}: {problem}; another architecture")
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(weights[name].shape)}, a GPT-2 of this width has {tuple(shape)}"
            )
        if not torch.isfinite(weights[name]).all():
            raise CheckpointError(f"{path}: {name} holds values that are not finite")


def _moments(
    path: Path, saved: Any, weights: dict[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]] | None, int | None]:
    """Return AdamW's state by our names, and the updates it counted; (None, None) where there is none.

    The file numbers parameters by group: matrices in the model's order, then vectors. Every shape is compared.
    """
    if saved is None:
        return None, None
    matrices = [name for name, tensor in weights.items() if tensor.dim() >= 2]
    vectors = [name for name, tensor in weights.items() if tensor.dim() < 2]
    try:
        groups = [list(group["params"]) for group in saved["param_groups"]]
        state = saved["state"]
        if not state:  # saved before the first update
            return None, None
        if [len(group) for group in groups] != [len(matrices), len(vectors)]:
            raise CheckpointError(
                f"{path}: the optimizer's groups are not AdamW's of matrices and of vectors"
            )
        ours: dict[str, dict[str, torch.Tensor]] = {}
        for name, index in zip([*matrices, *vectors], [*groups[0], *groups[1]], strict=True):
            step = torch.as_tensor(state[index]["step"], dtype=torch.float32).reshape(())
            ours[name] = {"step": step}
            for key in _MOMENTS:
                moment = _as_float(path, f"{key} of {name}", state[index][key])
                if moment.shape != weights[name].shape or not torch.isfinite(moment).all():
                    raise CheckpointError(f"{path}: the optimizer's {key} does not fit {name}")
                ours[name][key] = moment
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its optimizer is not AdamW's state ({error!r})") from error
    steps = {int(values["step"]) for values in ours.values()}
    if len(steps) != 1:
        raise CheckpointError(
            f"{path}: the optimizer's parameters have seen other numbers of steps"
        )
    return ours, steps.pop()


def _step(path: Path, content: dict[str, Any], counted: int | None) -> int:
    """Return the updates done: as the optimizer counted them, else `iter_num`, else the step just done."""
    if counted is not None:
        return counted
    if isinstance(content.get("iter_num"), int):
        return int(content["iter_num"])
    if isinstance(content.get("step"), int):
        return int(content["step"]) + 1  # that program counts from 0
    raise CheckpointError(f"{path}: neither iter_num nor step; how far it was trained is unknown")
