"""Bytes that a compiled graph holds at its peak: its own wrapper runs, on tensors without memory."""

from __future__ import annotations

import ast
import builtins
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def held_bytes(module: str, *, is_backward: bool) -> tuple[int, int]:
    """Return the bytes that a module of Inductor's holds when called once: at most, and at its end.

    The inputs of a forward graph are weights and token ids; they are not counted. The inputs of a backward graph are
    what the forward pass kept for it; they are counted until the graph frees them, one by one.
    """
    call, arguments = _functions(module)
    with _Live() as live:
        inputs = arguments()
        held = 0 if is_backward else live.now
        kept = [] if is_backward else list(inputs)  # the model keeps its weights
        live.most = live.now
        outputs = call(None, inputs)
        left = live.now - held
        del kept, outputs
    return live.most - held, left


def _functions(module: str) -> tuple[Any, Any]:
    """Return the module's `call` and `get_args`, on meta tensors; kernels and products do nothing."""
    wanted = {"call", "get_args"}
    tree = ast.parse(module.replace("from torch._dynamo.testing import rand_strided", ""))
    found: list[ast.stmt] = [
        x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name in wanted
    ]
    names = {x.id for one in found for x in ast.walk(one) if isinstance(x, ast.Name)}
    namespace: dict[str, Any] = {name: _Nothing() for name in names - set(dir(builtins))}
    namespace |= {
        "torch": _Torch(),
        "empty_strided_cuda": _empty,
        "empty_strided_cpu": _empty,
        "rand_strided": lambda size, stride, device, dtype: _empty(size, stride, dtype),
        "reinterpret_tensor": lambda x, size, stride, offset: torch.as_strided(
            x, size, stride, x.storage_offset() + offset
        ),
        "copy_if_misaligned": lambda x: x,
    }
    exec(compile(ast.Module(found, []), "wrapper", "exec"), namespace)
    return namespace["call"], namespace["get_args"]


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


class _Nothing:
    """A kernel, a library or a function of the device."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        return None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _Torch:
    """torch without its CUDA."""

    cuda = SimpleNamespace(_DeviceGuard=lambda index: _Nothing(), set_device=_Nothing())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the storages of what operators return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


# Recomputed operators are called with the random state of the first time; there is none here.
@run_and_save_rng_state.py_impl(_Live)  # type: ignore[untyped-decorator]
def _save_state(live: _Live, op: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    with live:
        return torch.empty(0, dtype=torch.uint8), op(*args, **kwargs)


@run_with_rng_state.py_impl(_Live)  # type: ignore[untyped-decorator]
def _restore_state(live: _Live, state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
    with live:
        return op(*args, **kwargs)
