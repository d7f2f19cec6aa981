"""torch.compile: whether a run uses it, what it makes of a training step, and its cache.

A step becomes one graph, or one for each kind of a deep model's parts. The model is compiled in place, so parameter
names get no `_orig_mod.`. Only the training call is compiled; evaluation and sampling call
`model.hidden` and `model.head` without gradients, and never make the step compile again.

By default torch caches compiled code in the temporary folder, which a reboot empties and where, on a shared machine,
anyone may put files that torch would load. The cache is therefore in the user's own folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt2lab import paths
from gpt2lab.config.derived import compiles
from gpt2lab.config.schema import SystemConfig
from gpt2lab.errors import ConfigError
from gpt2lab.model.gpt import GPT

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def resolve_compile(
    system: SystemConfig, *, device: torch.device, max_steps: int
) -> tuple[bool, str | None]:
    """Decide whether to compile; return the reason too where `auto` cannot.

    Raises: ConfigError if `on` is not possible.
    """
    if not compiles(system, on_gpu=device.type != "cpu", max_steps=max_steps):
        return False, None
    missing = missing_for_compile(device)
    if missing and system.compile == "on":
        raise ConfigError(
            f"compile on: {missing}; install it or use --compile off (with dropout also --allow_change compile)"
        )
    if missing:
        return False, f"not compiling: {missing}; training is only slower"
    return True, None


def missing_for_compile(device: torch.device) -> str | None:
    """Return what torch.compile lacks on this machine, or None; Triton needs a C compiler on a GPU too."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "no Triton (pip install triton)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        return "this GPU is older than Triton supports (compute capability 7.0)"
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++", "gcc", "cc")):
        return "no C++ compiler on the PATH"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h (install python3-dev)"
    return None


def compile_step(model: GPT, trained: nn.Module, *, by_region: bool) -> None:
    """Compile the forward pass of `trained`, which is the model or contains it, and so its backward pass.

    `by_region`: embeddings, each block, and head with loss apart. All blocks share one compiled region.
    """
    from torch._dynamo import config as dynamo_config  # slow; evaluation compiles nothing
    from torch._dynamo import reset, utils
    from torch._inductor import config as inductor_config

    reset()  # dynamo compiles 8 shapes of a function in a process, and would run the ninth uncompiled
    utils.counters.clear()
    utils.cumulative_time_spent_ns.clear()
    # Inductor reads the environment only when it is imported: before a run is known.
    # Compiled GELUs of a CPU take half the time with tanh written as an exponential. It is off by default for its
    # relative error near 0, which 1 + tanh does not see.
    inductor_config.cpp.use_decompose_tanh = True
    # Inductor otherwise times kernels, some of which add in another order, and takes the fastest.
    inductor_config.deterministic = torch.are_deterministic_algorithms_enabled()
    # DDP's compiler cuts one graph where a bucket is full, so that gradients travel early; regions are cut already.
    dynamo_config.optimize_ddp = not by_region
    if not by_region:
        trained.compile()
        return
    model.embed = _region(model.embed)  # type: ignore[method-assign]
    for block in model.blocks:
        block.forward = _region(block.forward)
    model.loss_sum = _region(model.loss_sum)  # type: ignore[method-assign]


def _region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled where gradients are computed."""
    compiled = torch.compile(function)

    def run(*args: Any) -> Any:
        return compiled(*args) if torch.is_grad_enabled() else function(*args)

    return run


def use_cache_folder() -> None:
    """Make torch cache compiled code in ~/.cache/gpt2lab/compiled, unless the environment names another folder.

    If that folder cannot be written, torch's default stays.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow

    # torch sets the variable to its default when it is imported: that is not the user's choice.
    if os.environ.get(_VARIABLE, default_cache_dir()) != default_cache_dir():
        return
    folder = paths.of_user("XDG_CACHE_HOME", ".cache") / "gpt2lab" / "compiled" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        return
    if usable:
        os.environ[_VARIABLE] = str(folder)


def _processor() -> str:
    """Name the processor's instruction set: machines with different ones may share a home folder."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{os.uname().machine}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def compiled_so_far() -> dict[str, Any]:
    """Return the seconds and graphs so far, as torch counts them: the fields of a run's `compile` event."""
    # Slow to import; only compiled runs need it.
    from torch._dynamo.utils import calculate_time_spent, counters

    hits, *others = (counters["inductor"][f"fxgraph_cache_{e}"] for e in ("hit", "miss", "bypass"))
    return {
        "compile_seconds": calculate_time_spent()["total_wall_time"],
        "graphs": hits + sum(others),  # Inductor's: one for a forward pass, one for its backward
        "from_cache": hits,
        "folder": os.environ.get(_VARIABLE),
    }
