"""Tensors and state, in and out of a checkpoint folder.

One format for any world size: safetensors files, keyed by parameter name, so loading runs no code. manifest.py hashes,
flushes and commits them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint import manifest as manifests
from gpt2lab.checkpoint.catalog import WEIGHTS
from gpt2lab.distributed.sharding import full_tensor, is_sharded, shard_like
from gpt2lab.errors import CheckpointError, is_out_of_memory
from gpt2lab.files import COUNT, NUMBER, OBJECT, STRING, JsonFile, is_number, list_of, or_null
from gpt2lab.optim.optimizers import SHAPED_STATE

NOT_FINITE, OVERFLOW = "not finite", "overflow"
MODEL, OPTIM, STATE = WEIGHTS, "optim.safetensors", "state.json"
AVERAGE = "average"  # of a weight's state: the mean of --average_tail
_ALIGNMENT = 64  # bytes, of tensors in the staging buffer
_MAX_STATE_BYTES = 2**30  # some 15 kB for each rank
# safetensors' names of the types of tensors, in its order: tensors of the last type come first in a file.
_NAMES = ("U8", "F16", "BF16", "I32", "F32", "F64", "I64")
_DTYPES = (
    *(torch.uint8, torch.float16, torch.bfloat16, torch.int32),
    *(torch.float32, torch.float64, torch.int64),
)
Optimizers = list[torch.optim.Optimizer]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainState:
    """Counts of what is done; a new one is made at each step."""

    step: int = 0  # completed optimizer steps
    samples: int = 0  # windows trained on: the next batch starts at this sample number
    tokens: int = 0  # trained on, also those that are no target
    train_seconds: float = 0.0  # steps only, no evaluation or saving, over all starts
    val_loss: float | None = None  # of exactly this step, None if it was not measured here
    best_val_loss: float | None = None
    best_step: int | None = None
    worse: int = 0  # validation losses in a row that were not the best
    best_from: int = 0  # evaluations up to this step are of other validation windows
    non_finite_in_a_row: int = 0  # updates skipped since the last good one
    recent_losses: tuple[float, ...] = ()  # what a spike is judged by
    # Updates skipped and samples jumped over: step, reason, samples.
    skipped: tuple[dict[str, Any], ...] = ()
    history: tuple[dict[str, Any], ...] = ()  # what --allow_change changed, and when
    unverified: tuple[str, ...] = ()  # shards read whose hashes were not compared before this save
    due: tuple[str, ...] = ()  # eval, hellaswag, core, sample: what this save did not wait for
    loss_scale: tuple[float, ...] | None = None  # of fp16: the scale, and steps since it changed

    def advance(
        self,
        *,
        samples: int,
        tokens: int,
        seconds: float,
        loss: float,
        skip_reason: str | None = None,
        loss_scale: tuple[float, ...] | None = None,
    ) -> TrainState:
        """Return the state one optimizer step on; `skip_reason` says why its update was not made, if it was not."""
        window = [self.samples, self.samples + samples]
        record = {"step": self.step + 1, "reason": skip_reason, "samples": window}
        return dataclasses.replace(
            self,
            step=self.step + 1,
            samples=window[1],
            tokens=self.tokens + tokens,
            train_seconds=self.train_seconds + seconds,
            val_loss=None,
            due=(),
            non_finite_in_a_row=0 if skip_reason != NOT_FINITE else self.non_finite_in_a_row + 1,
            recent_losses=extend(self.recent_losses, loss),
            loss_scale=loss_scale,
            skipped=(*self.skipped, record) if skip_reason else self.skipped,
        )

    def with_val_loss(self, val_loss: float) -> TrainState:
        """Return the state with this step's validation loss, which may be the best so far.

        Untrained weights (step 0) are never the best: there is no checkpoint of them.
        """
        state = dataclasses.replace(self, val_loss=val_loss, worse=self.worse + (self.step > 0))
        if self.step > 0 and (self.best_val_loss is None or val_loss < self.best_val_loss):
            return dataclasses.replace(state, best_val_loss=val_loss, best_step=self.step, worse=0)
        return state

    @staticmethod
    def from_file(file: JsonFile, values: dict[str, Any]) -> TrainState:
        """Build the state from its values in a file; one that an earlier version did not write has its default.

        Raises: the file's error if a value is invalid, or if this version does not know its name.
        """
        file.check(values, _REQUIRED, _RULES, where="state: ")
        if unknown := sorted(set(values) - {*_REQUIRED, *_RULES}):
            raise file.rejected(f"state: unknown {unknown[0]!r:.60}; written by another version?")
        for skip in values.get("skipped", ()):
            file.check(
                skip, {"step": COUNT, "reason": STRING, "samples": _RANGE}, where="skipped: "
            )
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        # An earlier version did not write it: without a best one, there was perhaps a change.
        fields.setdefault("best_from", 0 if fields.get("best_step") else fields["step"])
        return TrainState(**fields)


_OBJECTS = list_of(OBJECT, "a list of objects")
_RANGE = list_of(COUNT, "the numbers of two samples")
_LOSS = (lambda value: is_number(value) and abs(value) < 3.5e38, "a number that fp32 can hold")
_LOSSES = list_of(_LOSS, "a list of numbers")
_SCALE = (
    lambda pair: _LOSSES[0](pair) and len(pair) == 2 and pair[0] > 0 and 0 <= pair[1] < 2000,
    "a loss scale and the steps since it changed",
)
_REQUIRED = dict.fromkeys(("step", "samples", "tokens"), COUNT)
_RULES = {
    "train_seconds": NUMBER,
    **dict.fromkeys(("val_loss", "best_val_loss"), or_null(_LOSS)),
    "best_step": or_null(COUNT),
    **dict.fromkeys(("worse", "best_from", "non_finite_in_a_row"), COUNT),
    "recent_losses": _LOSSES,
    **dict.fromkeys(("skipped", "history"), _OBJECTS),
    **dict.fromkeys(("unverified", "due"), list_of(STRING, "a list of text")),
    "loss_scale": or_null(_SCALE),
}
WINDOW = 128  # losses that a new one is compared with, as in OLMo, levanter and llm.c


def extend(recent: tuple[float, ...], loss: float) -> tuple[float, ...]:
    """Return the window with one more loss. Spikes are included, so that a lasting rise is no spike."""
    return (*recent, loss)[-WINDOW:] if math.isfinite(loss) else recent


@dataclass(frozen=True)
class Content:
    """The full tensors of one checkpoint on the CPU, sorted by name."""

    model: Tensors  # "wte.weight"
    optimizer: Tensors  # "wte.weight/exp_avg"
    is_finite: bool = True  # every weight is; other weights must never become the newest checkpoint


def collect(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    keep: bool,
    into: StagingBuffer | None = None,
    only_copies: bool = False,
) -> Content:
    """Gather the full tensors of a checkpoint; a collective, which every rank calls.

    Without `keep` a rank gives its shards and gets nothing. With `into` all tensors are copied there, one by one;
    without it, tensors that are on the CPU already are not copied. With `only_copies` no kernel is launched, and
    `all_finite` of the copies is left to the caller.
    """
    if into is not None:
        into.reset()
    extremes: list[torch.Tensor] = []
    weights: Tensors = {}
    for name, parameter in sorted(model.named_parameters()):
        tensor = full_tensor(parameter.detach())
        if keep:
            extremes += () if only_copies else tensor.aminmax()  # one pass, where the weights are
            weights[name] = _to_cpu(tensor, into)
    moments: Tensors = {}
    for name, value in sorted(_optimizer_tensors(model, optimizers).items()):
        tensor = full_tensor(value)
        if keep:
            moments[name] = _to_cpu(tensor, into)
    # On a GPU this waits for the copies too, which are before it in the queue.
    return Content(weights, moments, not extremes or all_finite(torch.stack(extremes)))


def all_finite(*tensors: torch.Tensor) -> bool:
    """Tell whether no value is NaN or infinite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _to_cpu(tensor: torch.Tensor, into: StagingBuffer | None) -> torch.Tensor:
    return tensor.cpu().contiguous() if into is None else into.take(tensor)


class StagingBuffer:
    """Memory into which every save copies its tensors; page-locked for a GPU, whose copies are faster then."""

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        """Take all the memory at once, so that no later save finds too little.

        Raises: OSError.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)  # Linux
        self._bytes = torch.frombuffer(mmap.mmap(-1, num_bytes, flags), dtype=torch.uint8)
        self.num_bytes, self.address = num_bytes, self._bytes.data_ptr()
        self._used = 0
        self._is_pinned = pin and _cuda("cudaHostRegister", self.address, num_bytes, 0)

    def reset(self) -> None:
        """Begin a new checkpoint over the one before."""
        self._used = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in the buffer; it is complete once the device's queue has reached it."""
        begin = self._used
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        taken = self._bytes[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return taken.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Unlock the memory; it is freed once nothing refers to it."""
        if self._is_pinned:
            _cuda("cudaHostUnregister", self.address)


def _cuda(function: str, *arguments: int) -> bool:
    """Call a function of CUDA's runtime; tell whether it worked."""
    worked = int(getattr(torch.cuda.cudart(), function)(*arguments)) == 0  # type: ignore[no-untyped-call]
    if not worked:
        # CUDA keeps the error until somebody reads it, and torch reads it after each kernel launch: training would
        # end at the next one. torch has no cudaGetLastError for Python, so launching a kernel here takes the error.
        with contextlib.suppress(RuntimeError):
            torch.ones((), device="cuda")
    return worked


def staging_bytes(model: nn.Module, optimizers: Optimizers) -> int:
    """Return the size of the buffer that holds a checkpoint of this model with these optimizers as they are now."""
    tensors = [*model.parameters(), *_optimizer_tensors(model, optimizers).values()]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def has_sharded_state(model: nn.Module, optimizers: Optimizers) -> bool:
    """Tell whether tensors are sharded, so that one rank alone cannot make a checkpoint."""
    held = [parameter for o in optimizers for _, parameter in parameters_of(o, model)]
    return any(is_sharded(tensor) for tensor in [*model.parameters(), *held])


def draft(
    run_dir: Path,
    kind: str,
    content: Content,
    state: TrainState,
    rng_states: list[dict[str, Any]],
    *,
    facts: dict[str, Any],
    files: Mapping[str, bytes] | None = None,
) -> manifests.Draft:
    """Return what is committed; the tensors in it are the memory of `content`, not copies. Only rank 0 calls it.

    `facts` go into the manifest (config, data fingerprint, versions ...), `files` (the tokenizer's) beside the weights.
    """
    saved, _ = catalog.list_checkpoints(run_dir, labels={})
    content_of_state = {"state": dataclasses.asdict(state), "rng": rng_states}
    return manifests.Draft(
        step=state.step,
        files={
            MODEL: _serialized(content.model),
            OPTIM: _serialized(content.optimizer),
            **{name: [data] for name, data in (files or {}).items()},
            STATE: [json.dumps(content_of_state, allow_nan=False).encode()],
        },
        facts={
            **facts,
            "step": state.step,
            "kind": kind,
            "tokens": state.tokens,
            "samples": state.samples,
            "val_loss": state.val_loss,
            "best_val_loss": state.best_val_loss,
            # Later than every other one: it orders copies, and clocks can go back.
            "created": max([time.time(), *(info.created + 0.001 for info in saved)]),
        },
    )


def _serialized(tensors: Tensors) -> list[bytes | memoryview]:
    """Return a safetensors file in parts: its header, and the memory of each tensor.

    The bytes are those of `safetensors.torch.save`, which would copy every tensor twice.
    """
    order = sorted(tensors, key=lambda name: (-_DTYPES.index(tensors[name].dtype), name))
    header, begin = {}, 0
    for name in order:
        tensor, end = tensors[name], begin + tensors[name].nbytes
        dtype, shape = _NAMES[_DTYPES.index(tensor.dtype)], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    flat = [tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in order]
    return [len(text).to_bytes(8, "little") + text, *flat]


def parameters_of(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of an optimizer's parameters in its order; shards have names from the group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        pair
        for group in optimizer.param_groups
        for pair in zip(
            group.get("param_names") or [names[id(p)] for p in group["params"]],
            group["params"],
            strict=True,
        )
    ]


def _optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> Tensors:
    """Return {"parameter name/key": tensor or this rank's shard of it}."""
    return {
        f"{name}/{key}": value.detach()
        for optimizer in optimizers
        for name, parameter in parameters_of(optimizer, model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load(
    folder: Path, *, model: nn.Module, optimizers: Optimizers, other_optimizer: bool = False
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Put a verified checkpoint into model and optimizers; return the run's state, and each rank's generators.

    Names and shapes are compared before anything is copied. With `other_optimizer` the saved state belongs to another
    kind of optimizer and is not loaded.

    Raises: CheckpointError naming the file.
    """
    state, rng_states = _load_state(folder / STATE)
    load_model(folder, model)
    if not other_optimizer:
        _load_optimizers(folder / OPTIM, model, optimizers)
    return state, rng_states


def _load_state(path: Path) -> tuple[TrainState, list[dict[str, Any]]]:
    file = JsonFile(path, CheckpointError, at_most=_MAX_STATE_BYTES)
    content = file.read()
    file.check(content, {"state": OBJECT, "rng": list_of(OBJECT, "a list of objects")})
    return TrainState.from_file(file, content["state"]), content["rng"]


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path, device="cpu")
    # torch raises RuntimeError for disk errors.
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{path}: {error}; every machine of the run must see the same checkpoint folder"
        ) from error


def load_model(folder: Path, model: nn.Module) -> None:
    """Put a verified checkpoint's weights into a model.

    Raises: CheckpointError naming the file.
    """
    path = folder / MODEL
    tensors, parameters = _read(path), dict(model.named_parameters())
    found, wanted = ({n: t.shape for n, t in named.items()} for named in (tensors, parameters))
    _compare(path, found, wanted)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_like(tensors[name], parameter))


def _load_optimizers(path: Path, model: nn.Module, optimizers: Optimizers) -> None:
    by_name: dict[str, Tensors] = {}
    for full_name, tensor in _read(path).items():
        name, _, key = full_name.rpartition("/")
        by_name.setdefault(name, {})[key] = tensor
    held = [parameters_of(optimizer, model) for optimizer in optimizers]
    wanted = {name: parameter.shape for pairs in held for name, parameter in pairs}
    moments = {
        name: values[key].shape
        for name, values in by_name.items()
        for key in SHAPED_STATE
        if key in values
    }
    if by_name:  # else every step so far was skipped
        _compare(path, moments, wanted)
    for pairs, optimizer in zip(held, optimizers, strict=True):
        # Group settings are this start's; only the per-parameter state is loaded.
        content = optimizer.state_dict()
        content["state"] = {
            index: {key: shard_like(tensor, parameter) for key, tensor in by_name[name].items()}
            for index, (name, parameter) in enumerate(pairs)
            if by_name
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
