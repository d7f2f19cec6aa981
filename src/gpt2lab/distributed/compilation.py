"""What torch.compile makes of a training step: one graph, or one for each kind of a deep model's parts.

In place either way: no _orig_mod. in parameter names. Only the training call is compiled; evaluation and sampling call
`model.hidden` and `model.head` without gradients, and never make the step compile again.

By default torch caches compiled code in the temporary folder, which a reboot empties and where, on a shared machine,
anyone may put files that torch would load. The cache is therefore in the user's own folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt2lab import paths
from gpt2lab.model.gpt import GPT


def compile_step(model: GPT, trained: nn.Module, *, by_region: bool) -> None:
    """Compile the forward pass of `trained`, which is the model or contains it, and so its backward pass.

    `by_region`: embeddings, each block, and head with loss apart. All blocks share one compiled region.
    """
    from torch._dynamo import config as dynamo_config  # slow; evaluation compiles nothing
    from torch._inductor import config as inductor_config

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


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


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
