"""Our checkpoint save, while training waits and by a thread, against torch.save of the same, in turns."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gpt2lab import fmt
from gpt2lab.checkpoint import manifest, store
from gpt2lab.checkpoint.manifest import Draft
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import ModelName, OptimConfig
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import checkpoint_bytes
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.optim.optimizers import build_optimizers

OURS, ASYNC, BARE, FLUSHED = "gpt2lab", "gpt2lab, async", "torch.save", "torch.save, flushed"


def compare_saves(*, model_name: ModelName, rounds: int, folder: Path | None) -> dict[str, Any]:
    """Save random weights and moments `rounds` times each way; return seconds, bytes, and shares of torch.save's time.

    Ours hashes every byte, flushes it to the disk and renames once. torch.save does none of that: it returns when the
    bytes are in the kernel's cache; `flushed` adds the wait for the disk. `stall` holds the seconds for which training
    would wait: of an asynchronous save, those of the copy in memory.

    Raises: ConfigError if the folder has no room for one save; OSError if there is no memory for a copy.
    """
    needed = 2 * checkpoint_bytes(preset(model_name))
    with tempfile.TemporaryDirectory(prefix="gpt2lab-save-", dir=folder) as name:
        scratch = Path(name)
        if shutil.disk_usage(scratch).free < needed:
            raise ConfigError(
                f"{scratch.parent} has less than {fmt.num_bytes(needed)} free; give another --folder"
            )
        model, optimizers = _trained(model_name)
        buffer = store.StagingBuffer(store.staging_bytes(model, optimizers), pin=False)
        waited: dict[str, list[float]] = {}

        def save_async(target: Path) -> None:
            began = time.perf_counter()
            draft = _draft(target, store.collect(model, optimizers, keep=True, into=buffer))
            with ThreadPoolExecutor(1) as thread:
                saved = thread.submit(manifest.commit, target, draft)
                waited.setdefault(ASYNC, []).append(time.perf_counter() - began)
            saved.result()

        ways: dict[str, Callable[[Path], None]] = {
            OURS: lambda target: _ours(target, model, optimizers),
            ASYNC: save_async,
            BARE: lambda target: _torch_save(target, model, optimizers, flush=False),
            FLUSHED: lambda target: _torch_save(target, model, optimizers, flush=True),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        sizes: dict[str, int] = {}
        for turn in range(rounds + 1):  # the first is not counted: it meets cold memory and disk
            for way, save in ways.items():
                target = scratch / "save"
                target.mkdir()
                os.sync()  # what the one before left behind is not this one's to write
                began = time.perf_counter()
                save(target)
                if turn > 0:
                    seconds[way].append(time.perf_counter() - began)
                sizes[way] = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
                shutil.rmtree(target)
        buffer.close()
    return {
        "model": model_name,
        "rounds": rounds,
        "seconds": seconds,
        "stall": seconds | {ASYNC: waited[ASYNC][1:]},
        "bytes": sizes,
        "times_torch_save": {
            way: [a / b for a, b in zip(spent, seconds[BARE], strict=True)]
            for way, spent in seconds.items()
        },
    }


def describe(result: dict[str, Any]) -> str:
    """Write the measurement as a table."""
    rows = [
        [
            way,
            f"{statistics.median(spent):.2f}",
            f"{min(spent):.2f}",
            f"{max(spent):.2f}",
            f"{statistics.median(result['stall'][way]):.2f}",
            fmt.num_bytes(result["bytes"][way]),
            f"{statistics.median(result['times_torch_save'][way]):.2f}",
        ]
        for way, spent in result["seconds"].items()
    ]
    heads = ("", "seconds", "least", "most", "stall", "written", "x torch.save")
    head = f"{result['model']}, weights and two moments, median of {result['rounds']} rounds"
    return f"{head}\n{fmt.table(heads, rows)}"


def _trained(model_name: ModelName) -> tuple[GPT, list[torch.optim.Optimizer]]:
    """Return a model and an optimizer whose moments are filled by one step on random gradients."""
    device = torch.device("cpu")
    model = build_model(preset(model_name).model, seed=1, device=device)
    optimizers = build_optimizers(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizers


def _draft(target: Path, content: store.Content) -> Draft:
    return store.draft(
        target, kind="rolling", content=content, state=TrainState(), rng_states=[], facts={}
    )


def _ours(target: Path, model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    manifest.commit(target, _draft(target, store.collect(model, optimizers, keep=True)))


def _torch_save(
    target: Path, model: GPT, optimizers: list[torch.optim.Optimizer], *, flush: bool
) -> None:
    document = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    with open(target / "checkpoint.pt", "wb") as file:
        torch.save(document, file)
        if flush:
            file.flush()
            os.fsync(file.fileno())
