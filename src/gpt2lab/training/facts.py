"""What a start runs with and on: recorded in every manifest, compared at every resume."""

from __future__ import annotations

from typing import Any

import torch

from gpt2lab.config.settings import to_flat
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.planner.machine import cpu_name
from gpt2lab.runs.folder import provenance
from gpt2lab.training.start import Start


def facts_of(start: Start, runtime: Runtime) -> dict[str, Any]:
    """Return what every manifest of this start records besides the state: settings, data, and what it ran on."""
    on_gpu = runtime.device.type == "cuda"
    environment = {
        "device": torch.cuda.get_device_name(runtime.device) if on_gpu else cpu_name(),
        "world_size": runtime.world_size,
        "threads": torch.get_num_threads(),
        "mini_batch_size": start.config.batch.mini_batch_size,
        "dtype": start.config.system.dtype,
        "compile": start.config.system.compile,
        "parallel": start.config.system.parallel,
        "ddp_bucket_mb": start.config.system.ddp_bucket_mb,
        "deterministic": start.config.system.deterministic or not on_gpu,
        "torch": torch.__version__,
    }
    if start.attention is not None:
        environment["attention"] = start.attention
    return {
        "run": start.run_dir.name,
        "attempt": start.attempt,
        "config": to_flat(start.config),
        "data_fingerprint": start.data.fingerprint,
        "environment": environment,
        "on_gpu": on_gpu,
        "initial_weights": _initial_weights(start),
        "provenance": provenance() if runtime.rank == 0 else {},
    }


def _initial_weights(start: Start) -> dict[str, Any] | None:
    """Return the record of what the run began with, if not with random weights; a resume passes it on."""
    if start.initial is not None:
        return start.initial.record()
    return start.checkpoint.manifest.get("initial_weights") if start.checkpoint else None
