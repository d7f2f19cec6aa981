"""Small measured trials of what a run will do: write to its disk, take a step, add up across processes.

Nothing of the run is written, no trial is long, and what is written is removed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gpt2lab.config.schema import Config
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.files import staged_file
from gpt2lab.model.counts import flops_per_token
from gpt2lab.optim.schedule import lr_at
from gpt2lab.training.components import Components
from gpt2lab.training.train_step import train_step

DISK_BYTES = 512 * 10**6  # most that is written
STEP_TOKENS = 2048  # most that a process trains on
NETWORK_BYTES = 32 * 2**20  # most that is added up at once
_DISK_SECONDS = 10.0  # a slower disk is judged by what it wrote until then
_CPU_FLOPS = 1e12  # on a CPU, so that the step takes seconds and not minutes
_BLOCK = 16 * 2**20


@dataclass(frozen=True)
class DiskTrial:
    """How fast a disk took and gave back what a checkpoint's files are made of."""

    num_bytes: int
    write_seconds: float  # hashed and flushed, as in a save
    read_seconds: float  # from the disk where the system forgets on request, and hashed
    intact: bool


def try_disk(folder: Path, num_bytes: int) -> DiskTrial:
    """Write random bytes to a file in `folder`, read them back, and remove it.

    Raises: OSError if that cannot be done.
    """
    block = os.urandom(min(_BLOCK, num_bytes))
    digests, written, began = (hashlib.sha256(), hashlib.sha256()), 0, time.monotonic()
    with staged_file(folder / "gpt2lab-trial") as path:
        with open(path, "wb") as file:
            while written < num_bytes and time.monotonic() - began < _DISK_SECONDS:
                part = block[: num_bytes - written]
                digests[0].update(part)
                written += file.write(part)
            file.flush()
            os.fsync(file.fileno())
            write_seconds = time.monotonic() - began
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        with open(path, "rb") as file:
            while part := file.read(_BLOCK):
                digests[1].update(part)
        read_seconds = time.monotonic() - began
    intact = digests[0].digest() == digests[1].digest()
    return DiskTrial(written, write_seconds, read_seconds, intact)


@dataclass(frozen=True)
class StepTrial:
    """The second of two optimizer steps on one small micro-batch of each process."""

    tokens: int  # of one process
    seconds: float
    loss: float
    grad_norm: float


def try_step(
    config: Config, components: Components, batch: GlobalBatch, runtime: Runtime, max_steps: int
) -> StepTrial:
    """Take two real steps, uncompiled, on a slice of `batch`; the components cannot train afterwards."""
    most = STEP_TOKENS
    if runtime.device.type == "cpu":
        most = min(most, max(1, int(_CPU_FLOPS / flops_per_token(config.model))))
    part = _cut(batch, most=most, runtime=runtime)
    for _ in range(2):  # the first makes memory and kernels ready
        began = time.monotonic()
        with torch.compiler.set_stance("force_eager"):
            stats = train_step(
                components.trained,
                components.optimizers,
                part,
                lr_at(components.state.step + 1, config.optim, max_steps=max_steps),
                strategy=components.strategy,
                grad_clip=config.optim.grad_clip,
                seed=config.data.seed,
            )
        runtime.synchronize()
    seconds, tokens = time.monotonic() - began, part.micro_batches[0].tokens.numel()
    return StepTrial(tokens, seconds, stats.loss, stats.grad_norm)


def _cut(batch: GlobalBatch, *, most: int, runtime: Runtime) -> GlobalBatch:
    """Return a batch of one micro-batch a process with at most `most` tokens, shorter windows if one is too long."""
    micro = batch.micro_batches[0]
    rows, length = micro.tokens.shape
    length = min(length, most)
    rows = min(rows, most // length)
    part = dataclasses.replace(
        micro,
        tokens=micro.tokens[:rows, :length].contiguous(),
        targets=micro.targets[:rows, :length].contiguous(),
        is_last=True,
    )
    targets = runtime.sum_over_ranks((part.targets >= 0).sum())
    return dataclasses.replace(batch, micro_batches=(part,), num_targets=max(1, int(targets)))


@dataclass(frozen=True)
class NetworkTrial:
    """All-reduce between the processes, as this one saw it."""

    latency_seconds: float  # of 4 bytes
    num_bytes: int  # summed to find the rate
    bytes_per_second: float


def try_network(runtime: Runtime, gradient_bytes: int) -> NetworkTrial:
    """Time all-reduces of a number and of up to 32 MiB; medians."""
    num_bytes = min(gradient_bytes, NETWORK_BYTES)
    seconds = []
    for elements, rounds in ((1, 50), (num_bytes // 4, 3)):
        values = torch.zeros(elements, device=runtime.device)
        times = []
        for _ in range(rounds + 1):
            runtime.synchronize()
            began = time.monotonic()
            dist.all_reduce(values)
            runtime.synchronize()
            times.append(time.monotonic() - began)
        seconds.append(statistics.median(times[1:]))  # the first one connects
    return NetworkTrial(seconds[0], num_bytes, num_bytes / seconds[1])
