"""What first_card.py asks of torch, in a process that ends: `facts DEVICE`, or as a rank `all_reduce DEVICE`."""

from __future__ import annotations

import json
import platform
import sys
import time
from typing import Any

import torch

from gpt2lab.distributed.compilation import missing_for_compile
from gpt2lab.distributed.processor import cores, cpu_name

_BYTES = {"cuda": 2**28, "cpu": 2**24}
_ROUNDS = 10


def facts(device: str) -> dict[str, Any]:
    """Return versions, what torch sees, and what compiling lacks."""
    on_gpu, nccl = device == "cuda", None
    count = torch.cuda.device_count() if on_gpu else 0
    if count:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]
        "NCCL": nccl,
    }
    usable = torch.device(device) if count or not on_gpu else torch.device("cpu")
    return {
        "versions": versions,
        "cards": count,
        "processor": cpu_name(),
        "cores": cores(),
        "missing": missing_for_compile(usable),
    }


def all_reduce(device: str) -> dict[str, Any]:
    """Return the bytes/s of a large all-reduce as one rank sees it: size x 2 (N - 1) / N over seconds."""
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    tensor = torch.zeros(_BYTES[device] // 4, device=where)
    seconds = []
    for _ in range(_ROUNDS):
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    torch.distributed.destroy_process_group()
    sent = tensor.nbytes * 2 * (world - 1) / world
    return {"bytes_per_second": sent / sorted(seconds)[_ROUNDS // 2]} if rank == 0 else {}


if __name__ == "__main__":
    found = {"facts": facts, "all_reduce": all_reduce}[sys.argv[1]](sys.argv[2])
    if found:
        print(json.dumps(found))
