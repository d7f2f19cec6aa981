"""What a start consists of once it is built: its tensors and data, and what watches and records it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpt2lab.checkpoint.store import TrainState
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import GPT
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.average import TailAverage
from gpt2lab.training.control import Control
from gpt2lab.training.heartbeat import Heartbeat
from gpt2lab.training.progress import RunClock
from gpt2lab.training.recipe import Batches
from gpt2lab.training.resume_check import ResumeCheck
from gpt2lab.training.start import Start


@dataclass(frozen=True)
class Components:
    """What is trained, and on what; complete before anything of the run is written."""

    start: Start
    runtime: Runtime
    strategy: Strategy
    facts: dict[str, Any]  # recorded in every manifest: settings, data, environment
    model: GPT  # plain: evaluated, sampled and saved
    trained: nn.Module  # the same weights, compiled and distributed
    optimizers: list[torch.optim.Optimizer]
    average: TailAverage
    batches: Batches
    state: TrainState  # the run's state at the beginning of this start
    resume_check: ResumeCheck | None  # of a resume
    # Why the host decides on each update before it is made. None: the device does, and steps are pipelined.
    host_decides: str | None


@dataclass(frozen=True)
class Session:
    """What the loop, the saver and the evaluator share to record a start and to end it."""

    folder: RunFolder | None  # on rank 0 only
    logger: MetricsLogger
    control: Control
    heartbeat: Heartbeat
    clock: RunClock
    updating: Callable[[int], None]  # of extensions: before an update, its gradients complete
    peak_flops: float | None  # dense bf16 or fp16, of all ranks together; None: MFU is n/a
