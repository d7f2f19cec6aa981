"""Runs any PyTorch training script and looks inside; a program of its own, which knows nothing of the script.

instrument.py memory|profile|memory+profile RESULT.json SCRIPT [FLAGS...]

`memory`: the peak of live tensor bytes over the first three optimizer steps. `profile`: seconds by operator of two
later ones. The process ends as soon as that is known; steps are told by torch's own hook on optimizers.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

_MEMORY_STEPS = 3
_PROFILE_FROM, _PROFILE_STEPS = 5, 2  # after compilation and warm-up


def main(what: str, result: str, script: str, *flags: str) -> None:
    """Run `script` with the hook in place."""
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    torch._inductor.config.cpp.enable_kernel_profile = True  # compiled kernels by name
    steps, began, last, counted = 0, 0.0, _MEMORY_STEPS, None
    found: dict[str, Any] = {}
    memory, profiler = _profiler(memory=True), _profiler(memory=False)
    if "profile" in what:
        last = _PROFILE_FROM + _PROFILE_STEPS
    if "memory" in what and not torch.cuda.is_available():
        memory.start()

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal steps, began, counted
        counted = counted or optimizer
        if optimizer is not counted:  # Muon's step is one of two optimizers
            return
        steps += 1
        if "memory" in what and steps == _MEMORY_STEPS:
            if not torch.cuda.is_available():  # a GPU's allocator knows its peak
                memory.stop()
            found["peak_live_bytes"] = _peak_bytes(memory)
        if "profile" in what and steps == _PROFILE_FROM:
            profiler.start()
            began = _now()
        if "profile" in what and steps == last:
            seconds = (_now() - began) / _PROFILE_STEPS
            profiler.stop()
            found.update(step_seconds=seconds, operators=_operators(profiler))
        if steps == last:
            _leave(result, found)

    register_optimizer_step_post_hook(after_step)
    runpy.run_path(script, run_name="__main__")


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _profiler(*, memory: bool) -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, profile_memory=memory)


def _peak_bytes(profiler: profile) -> int:
    """Return the largest sum of live bytes that the allocators reported."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]"]
    return int(max(totals))


def _operators(profiler: profile) -> dict[str, float]:
    """Return {operator or kernel: seconds of its own in a step}; on a GPU the kernels' seconds there."""
    on_gpu = torch.cuda.is_available()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        if on_gpu and (not str(event.device_type).endswith("CUDA") or event.is_user_annotation):
            continue  # an annotation, such as `Optimizer.step`, spans kernels that are counted themselves
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found[event.key] = found.get(event.key, 0.0) + micros / 1e6 / _PROFILE_STEPS
    return found


def _leave(result: str, found: dict[str, Any]) -> None:
    """Write the result in one move, and end without letting the script save or say anything."""
    path = Path(result)
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
