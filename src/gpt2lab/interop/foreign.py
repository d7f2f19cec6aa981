"""Read the .pt files of nanoGPT, of build-nanogpt and of this program's predecessor as a GPT-2 of gpt2lab.

All three pickle a dict with `model` and mostly `optimizer`. Parameter names and shapes are GPT-2's with `transformer.`
in front; matrices are stored as nn.Linear stores them. torch.load reads them with weights_only, which runs no code.
Files that pickle an object for their settings need `trust`; even then numpy's array constructors are all that may be
called besides torch's own list.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import functional as F

from gpt2lab.config.schema import ModelConfig
from gpt2lab.errors import CheckpointError, ConfigError, DataError, GPT2LabError, first_line
from gpt2lab.files import is_number, open_regular
from gpt2lab.model.gpt import empty_model
from gpt2lab.model.hf_config import our_name

_T = TypeVar("_T")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WRAPPERS = re.compile(r"(module\.|_orig_mod\.)*")  # DDP's and torch.compile's
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
_NUMBER_TYPES = tuple(type(np.dtype(code)) for code in "?bBhHiIlLqQefdSU")
_NEVER_MEASURED = 1e9  # nanoGPT's best_val_loss before its first evaluation
_WRITERS = ("__main__", "model", "train", "train_improved", "argparse", "pathlib")


@dataclass(frozen=True)
class ForeignCheckpoint:
    """What a foreign file holds, from which a run of ours can continue."""

    model: ModelConfig
    weights: dict[str, torch.Tensor]  # by our names, fp32
    moments: dict[str, dict[str, torch.Tensor]] | None  # AdamW's, by our names
    step: int  # updates that the weights have seen
    is_nanogpt: bool
    has_biases: bool
    settings: dict[str, Any]  # nanoGPT's, by its names: numbers, text and truth values
    next_rate: float | None  # nanoGPT's learning rate of the next update
    best_val_loss: float | None  # as nanoGPT measured it

    def with_rows(self, count: int) -> ForeignCheckpoint:
        """Return the same with `count` rows of zeros below the embedding, which take no part in any loss."""
        name = "wte.weight"
        weights = self.weights | {name: F.pad(self.weights[name], (0, 0, 0, count))}
        moments = self.moments
        if moments is not None:
            padded = {key: F.pad(moments[name][key], (0, 0, 0, count)) for key in _MOMENTS}
            moments = moments | {name: moments[name] | padded}
        return dataclasses.replace(self, weights=weights, moments=moments)


def read_foreign(path: Path, *, trust: bool) -> ForeignCheckpoint:
    """Read and check a file; the weights stay unchanged.

    Raises: CheckpointError naming everything that is missing, or what it is instead.
    """
    content = _load(path, trust=trust)
    if not isinstance(content, dict) or not isinstance(content.get("model"), Mapping):
        raise CheckpointError(
            f"{path}: no `model` with weights; supported are the .pt files of nanoGPT and of programs derived from it"
        )
    problems = Problems()
    found = problems.of
    weights = found(lambda: _weights(content["model"])) or {}
    heads = found(lambda: _heads(content))
    model = found(lambda: _shape(weights, 1 if heads is None else heads)) if weights else None
    added: dict[str, torch.Tensor] = {}
    if model is not None:
        wanted = {name: p.shape for name, p in empty_model(model).named_parameters()}
        # Zeros for a model without any biases; one that lacks some is another model.
        if not any(name.endswith(".bias") for name in weights):
            added = {n: torch.zeros(shape) for n, shape in wanted.items() if n.endswith(".bias")}
        problems.found += map(CheckpointError, _differences(weights | added, wanted))
    moments, steps = found(lambda: _moments(content.get("optimizer"), weights)) or (None, None)
    step = found(lambda: _step(content, steps))
    if problems.found or model is None or step is None:
        raise CheckpointError(f"{path}: {'; '.join(map(str, problems.found))}")
    if moments is not None and steps is not None:
        for name, zero in added.items():
            zeros = {key: torch.zeros_like(zero) for key in _MOMENTS}
            moments[name] = {"step": torch.tensor(float(steps)), **zeros}
    is_nanogpt = isinstance(content.get("model_args"), Mapping)
    settings = content.get("config") if is_nanogpt else None
    settings = settings.items() if isinstance(settings, Mapping) else ()
    return ForeignCheckpoint(
        model,
        weights | added,
        moments,
        step,
        is_nanogpt=is_nanogpt,
        has_biases=not added,
        settings={str(n): value for n, value in settings if type(value) in (int, float, bool, str)},
        next_rate=_next_rate(content.get("optimizer")) if is_nanogpt else None,
        best_val_loss=_number(content.get("best_val_loss")),
    )


@dataclass
class Problems:
    """What is wrong with several things, each of which is checked whatever the others have."""

    found: list[GPT2LabError] = field(default_factory=list)

    def of(self, act: Callable[[], _T]) -> _T | None:
        """Return what `act` returns; None, and its error is noted, if it rejects something."""
        try:
            return act()
        except (CheckpointError, ConfigError, DataError) as error:
            self.found.append(error)
            return None


def _number(value: Any) -> float | None:
    """Return a finite number or a tensor of one as a float, None for all else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if is_number(value) and abs(value) < _NEVER_MEASURED else None


def _next_rate(optimizer: Any) -> float | None:
    try:
        return _number(optimizer["param_groups"][0]["lr"])
    except (KeyError, IndexError, TypeError):
        return None


def _load(path: Path, *, trust: bool) -> Any:
    try:
        open_regular(path, follow=True).close()
        allowed = _stand_ins(path)
        if len(allowed) > len(_NUMBER_TYPES) and not trust:
            raise CheckpointError(
                f"{path}: holds pickled objects, which can run code; if you know who wrote it, add --trust"
            )
        torchs = torch.serialization.safe_globals(allowed if trust else [])
        with warnings.catch_warnings(), torchs:
            warnings.simplefilter("ignore")  # torch's own lines about a pickle of another kind
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (
        *(pickle.UnpicklingError, RuntimeError, EOFError, ValueError),
        *(KeyError, AttributeError, TypeError, IndexError, zipfile.BadZipFile),
    ) as error:
        reason = "" if isinstance(error, pickle.UnpicklingError) else f" ({first_line(error)})"
        raise CheckpointError(
            f"{path}: not a checkpoint that torch.save of torch 1.6 or later wrote{reason}"
        ) from error


class _StandIn:
    """Replaces a class that only the file's writer has; keeps its fields and runs none of its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _stand_ins(path: Path) -> list[Any]:
    """Return what a trusted file may call besides torch's own list: numpy's arrays, and stand-ins for settings."""
    found: list[Any] = [*_NUMBER_TYPES]
    if not zipfile.is_zipfile(path):  # torch's format before 1.6 does not list what it calls
        return found
    with zipfile.ZipFile(path) as archive:
        if any(one.compress_type for one in archive.infolist()):
            raise CheckpointError(f"{path}: compressed, which torch.save never does; not unpacked")
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(path):
        if name in _ARRAYS:
            found.append((_ARRAYS[name], name))
        elif name.partition(".")[0] in _WRITERS:
            found.append((_StandIn, name))
        else:
            raise CheckpointError(f"{path}: rejected, because loading it would call {name}")
    return found


def _weights(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return {our name: fp32 tensor}, in the file's order."""
    ours: dict[str, torch.Tensor] = {}
    for full_name, tensor in tensors.items():
        short = our_name(_WRAPPERS.sub("", str(full_name), count=1))
        if short is None:
            continue
        ours[short] = _as_float(str(full_name), tensor)
    if not ours:
        raise CheckpointError("`model` holds no weights")
    head = ours.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, ours.get("wte.weight", head.new_empty(0))):
        raise CheckpointError(
            "lm_head.weight differs from wte.weight; only a tied head is supported"
        )
    return ours


def _as_float(name: str, tensor: Any) -> torch.Tensor:
    """Return a tensor in fp32; a tiny file can claim terabytes of one value repeated, which is rejected."""
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    if not is_plain or tensor.is_nested or not tensor.is_cpu or not tensor.is_floating_point():
        raise CheckpointError(f"{name} is not a dense tensor of floating-point numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{name} claims more values than the file holds")
    return tensor.float().contiguous()


def _heads(content: dict[str, Any]) -> int:
    """Return the number of heads, which cannot be derived from the tensors' shapes."""
    for key in ("model_args", "config", "args"):
        found = content.get(key)
        values = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
        for name in _HEADS:
            if isinstance(values.get(name), int):
                return int(values[name])
    raise CheckpointError(
        "no n_head in model_args, config or args, and it cannot be derived from the tensors"
    )


def _shape(weights: dict[str, torch.Tensor], n_head: int) -> ModelConfig:
    for name in ("wte.weight", "wpe.weight"):
        if name not in weights or weights[name].dim() != 2:
            raise CheckpointError(f"no tensor {name}; not a GPT-2")
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    vocab_size, n_embd = weights["wte.weight"].shape
    if n_head < 1 or n_embd % n_head:
        raise CheckpointError(f"width {n_embd} is not a multiple of n_head {n_head}")
    return ModelConfig(
        n_layer=len(blocks),
        n_head=n_head,
        n_embd=n_embd,
        context_length=weights["wpe.weight"].size(0),
        vocab_size=vocab_size,
    )


def _differences(weights: dict[str, torch.Tensor], wanted: dict[str, torch.Size]) -> list[str]:
    """List how the tensors differ from those of our model, of the shapes `wanted`: names, shapes, finite values."""
    problems = [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        "; another architecture"
        for what, names in (
            ("no tensor", sorted(set(wanted) - set(weights))),
            ("unknown tensor", sorted(set(weights) - set(wanted))),
        )
        if names
    ]
    for name, shape in wanted.items():
        if name not in weights:
            continue
        if weights[name].shape != shape:
            here = tuple(weights[name].shape)
            problems.append(f"{name} is {here}, a GPT-2 of this width has {tuple(shape)}")
        elif not torch.isfinite(weights[name]).all():
            problems.append(f"{name} holds values that are not finite")
    return problems


def _moments(
    saved: Any, weights: dict[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]] | None, int | None]:
    """Return AdamW's state by our names, and the updates it counted; (None, None) where there is none.

    The file numbers parameters by group: matrices in the model's order, then vectors. Every shape is compared.
    """
    if saved is None or not weights:
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
                "the optimizer's groups are not AdamW's of matrices and of vectors"
            )
        ours: dict[str, dict[str, torch.Tensor]] = {}
        for name, index in zip([*matrices, *vectors], [*groups[0], *groups[1]], strict=True):
            step = torch.as_tensor(state[index]["step"], dtype=torch.float32).reshape(())
            ours[name] = {"step": step}
            for key in _MOMENTS:
                moment = _as_float(f"{key} of {name}", state[index][key])
                if moment.shape != weights[name].shape or not torch.isfinite(moment).all():
                    raise CheckpointError(f"the optimizer's {key} does not fit {name}")
                ours[name][key] = moment
        steps = {int(values["step"]) for values in ours.values()}
    except (
        *(LookupError, TypeError, AttributeError),
        *(ArithmeticError, ValueError, RuntimeError),
    ) as error:
        raise CheckpointError(f"its optimizer is not AdamW's state ({error!r})") from error
    if len(steps) != 1:
        raise CheckpointError("the optimizer's parameters have different numbers of steps")
    return ours, steps.pop()


def _step(content: dict[str, Any], counted: int | None) -> int:
    """Return the updates done: nanoGPT's `iter_num`, which its schedule follows, else as the optimizer counted them.

    With fp16 nanoGPT leaves out updates: then its optimizer has counted fewer.
    """
    step = content["iter_num"] if type(content.get("iter_num")) is int else counted
    if step is None and type(content.get("step")) is int:
        # Both count from 0: build-nanogpt saves before the update, this program's predecessor after it.
        step = int(content["step"]) + ("args" in content)
    if step is None or step < 0:
        which = "neither iter_num nor step" if step is None else f"{step} updates"
        raise CheckpointError(f"{which}: the number of updates is unknown")
    return step
