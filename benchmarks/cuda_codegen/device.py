"""A CUDA device that is not there, for torch's CPU wheel: it traces, differentiates and compiles, but nothing runs.

`install` changes torch for the rest of the process, so only programs of their own call it, before they import torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab.errors import ConfigError

Architecture = Literal["sm_80", "sm_90", "sm_100"]
_COMPILER = "g++"


@dataclass(frozen=True)
class Card:
    """What Inductor and Triton ask a GPU. Source: NVIDIA's data sheets and CUDA's table of compute capabilities."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    total_memory: int = 80 * 2**30
    shared_memory_per_block: int = 48 * 2**10
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


CARDS: dict[Architecture, Card] = {
    "sm_80": Card("NVIDIA A100-SXM4-80GB", 8, 0, 108, 40 * 2**20, 163 * 2**10, 164 * 2**10),
    "sm_90": Card("NVIDIA H100 80GB HBM3", 9, 0, 132, 50 * 2**20, 227 * 2**10, 228 * 2**10),
    "sm_100": Card("NVIDIA B200", 10, 0, 148, 126 * 2**20, 227 * 2**10, 228 * 2**10, 180 * 2**30),
}


def what_is_missing() -> str | None:
    """Return what this machine lacks to compile for an absent GPU, or None."""
    if importlib.util.find_spec("triton") is None:
        return "no Triton (the extra codegen: pip install triton==3.7.1)"
    if shutil.which(_COMPILER) is None:
        return f"no C++ compiler {_COMPILER} on the PATH"
    if not re.search(r"^cuda\b.*= None$", (_torch_folder() / "version.py").read_text(), re.M):
        return "torch for CUDA has a device of its own; install torch for CPUs"
    return None


def build(library: Path) -> None:
    """Compile device.cpp for the installed torch.

    Raises: ConfigError if Triton or the compiler is missing, or the compiler fails.
    """
    if missing := what_is_missing():
        raise ConfigError(f"codegen: {missing}")
    torch, source = _torch_folder(), Path(__file__).with_name("device.cpp")
    include = torch / "include"
    command = [_COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", str(source)]
    command += [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"codegen: {source} does not compile: {done.stderr[-300:]}")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def install(architecture: Architecture, library: Path) -> None:
    """Give torch and Triton the card of that architecture; `library` is what `build` made."""
    assert "torch" not in sys.modules, "torch has looked for a GPU already"
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    card = CARDS[architecture]
    _answer_for_torch(card)
    _answer_for_triton(card)
    _fold_constants_on_the_cpu()


def _answer_for_torch(card: Card) -> None:
    """Replace what asks the driver, before torch._dynamo copies these functions."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    assert "torch._dynamo.device_interface" not in sys.modules
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_device_name": lambda device=None: card.name,
        "is_bf16_supported": lambda *unused, **more: True,
        "_is_compiled": lambda: True,
        "_lazy_init": _nothing(),
        "set_device": _nothing(),
        "synchronize": lambda *unused: _wait("synchronize"),
        "manual_seed": _nothing(),
        "manual_seed_all": _nothing(),
        "get_rng_state": lambda *unused: torch.get_rng_state(),
        "set_rng_state": _nothing(),
        "device": _Device,
        "Event": _Event,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, answers[name])
    torch.version.cuda = "13.0"
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        setattr(torch._C, name, lambda *unused: 0)
    # The device guard above suffices; torch's own no-op would replace it.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    FakeTensor.item = lambda self: _wait("item")  # type: ignore[method-assign]


waits: list[str] = []  # for the card, by the function that would have waited


def _wait(name: str) -> float:
    waits.append(name)
    return 1.0


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing: Dynamo has a rule for each function of torch's."""
    return lambda *unused, **more: None


class _Device:
    """torch.cuda.device, which sets the current device within a block."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _Event:
    """torch.cuda.Event."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self) -> None:
        """Mark nothing."""

    def synchronize(self) -> None:
        """Note that it was waited for."""
        _wait("Event.synchronize")


def _answer_for_triton(card: Card) -> None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    properties = {
        "max_shared_mem": card.shared_memory_per_block_optin,
        "multiprocessor_count": card.multi_processor_count,
        "max_num_regs": card.regs_per_multiprocessor,
        "warpSize": card.warp_size,
    }

    class Driver:
        utils = types.SimpleNamespace(get_device_properties=lambda device: properties)

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * card.major + card.minor, card.warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    backends["nvidia"] = dataclasses.replace(backends["nvidia"], driver=Driver)
    driver.set_active(Driver())


def _fold_constants_on_the_cpu() -> None:
    """Let Inductor compute the constants that it folds: it makes real tensors for that."""
    import torch
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.prims.device_put.default:
                return args[0]
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)

    fold = UniformValueConstantFolder.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with OnCpu():  # type: ignore[no-untyped-call]
            return fold(self, *args, **kwargs)

    UniformValueConstantFolder.run = run  # type: ignore[method-assign]
