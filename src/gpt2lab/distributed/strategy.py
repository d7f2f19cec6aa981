"""How one model runs on many processes: transformations of a plain module, in one stated order."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gpt2lab.config.derived import CPU_COMPILE_FROM_STEPS
from gpt2lab.config.schema import Parallel, Recompute, SystemConfig
from gpt2lab.distributed import fsdp, zero1
from gpt2lab.distributed.exact_reduction import ExactReduction
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import ConfigError
from gpt2lab.model.activation_checkpointing import recompute_activations
from gpt2lab.model.gpt import GPT


class Strategy:
    """Recompute, compile, then distribute; and the moments of a step at which processes meet."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        compile: bool,
        dtype: str,
        reduce: str = "fast",
        parallel: Parallel = "ddp",
        recompute: Recompute = "none",
        bucket_mb: float = 25.0,
        offload: bool = False,
    ) -> None:
        """`parallel`, `bucket_mb` (DDP's) and `offload` (fsdp's) say how several processes share; one needs nothing."""
        self._exact = ExactReduction(runtime) if reduce == "exact" else None
        # DDP and FSDP average gradients over processes; what is scaled up by this becomes their sum.
        self.averaged_over = 1 if self._exact else runtime.world_size
        self.device = runtime.device
        self._runtime, self._compile, self._dtype = runtime, compile, dtype
        self._recompute, self._bucket_mb, self._offload = recompute, bucket_mb, offload
        self._parallel = parallel if runtime.is_distributed else "ddp"
        self._marks: list[Any] = []

    @staticmethod
    def of(runtime: Runtime, system: SystemConfig) -> Strategy:
        """Return what the settings say, with dtype and compile decided."""
        return Strategy(
            runtime,
            compile=system.compile == "on",
            dtype=system.dtype,
            reduce=system.reduce,
            parallel=system.parallel,
            recompute=system.activation_checkpointing,
            bucket_mb=system.ddp_bucket_mb,
            offload=system.fsdp_offload,
        )

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        """All processes in one row."""
        return init_device_mesh(self.device.type, (self._runtime.world_size,))

    def prepare(
        self, model: GPT, to_train: Callable[[GPT], nn.Module] = lambda model: model
    ) -> nn.Module:
        """Return the module to train; `model` keeps its parameters' names, under fsdp only its rows of them.

        `to_train` may put the model into another module, whose forward gives the loss.
        """
        if self._parallel == "fsdp":
            self._bare = fsdp.skeleton(model)
        trained = to_train(model)
        recompute_activations(model, self._recompute)
        if self._compile:
            # In place: no _orig_mod. in parameter names. Only the training call is compiled: evaluation and sampling
            # use model.logits and model.hidden, so their shapes never make the step compile again.
            trained.compile()
        if self._parallel == "fsdp":
            fsdp.shard(model, trained, self._mesh, offload=self._offload)
        elif self._runtime.is_distributed and self._exact is None:
            return DistributedDataParallel(
                trained, gradient_as_bucket_view=True, bucket_cap_mb=self._bucket_mb
            )
        return trained

    def share_state(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """Return fresh optimizers of the prepared model, with state for what this process shall hold alone.

        Raises: ConfigError for an optimizer that this mode cannot split.
        """
        if self._parallel == "zero1":
            zero1.share_state(model, optimizers, self._mesh)
        elif self._parallel == "fsdp":
            zero1.check_elementwise(optimizers, "fsdp")
        return optimizers

    @contextlib.contextmanager
    def whole(self, model: GPT) -> Iterator[GPT]:
        """Lend the model with all its weights, to evaluate or to sample; all processes enter together."""
        if self._parallel == "fsdp":
            yield fsdp.gather_model(model, self._bare, self.device)
        else:
            yield model

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the global gradient to at most `max_norm`, and return its L2 norm before, ()."""
        if self._parallel == "fsdp":
            return fsdp.clip_grad_norm(model, max_norm)
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def settle(self, model: nn.Module, *, batch_size: int, context_length: int) -> None:
        """Make the first step sum like all others: two throw-away backward passes, before any weight moves.

        After its first backward DDP regroups the gradients into other buckets. From three processes on a resumed
        run's first step would therefore add in another order than the same step of the run that was never stopped.
        """
        if not isinstance(model, DistributedDataParallel):
            return
        ids = torch.zeros(batch_size, context_length, dtype=torch.int64, device=self.device)
        for _ in range(2):
            with self.autocast():
                loss = model(ids, ids)
            loss.backward()
        self.clear_gradients(model)

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[None]:
        """Hold gradients back until the last micro-batch; under fsdp those of the blocks never (sharding/fsdp.py).

        The context must cover the forward too: DDP decides there whether the coming backward will all-reduce.
        """
        if self._exact is not None:
            return self._exact.micro_batch(model, is_last=enabled)
        if self._parallel == "fsdp":
            fsdp.keep_whole(model, after_backward=not enabled)
        if enabled or not isinstance(model, DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()

    def clear_gradients(self, model: nn.Module) -> None:
        """Begin the next step without gradients.

        Those of DDP are views of its buckets and are kept at zero: without, the micro-batches before the last would sum
        into memory of their own, as much again.
        """
        model.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))

    def begin_work(self) -> None:
        """Begin to time what this process does alone; processes wait for each other in the rest of a step."""
        self._marks = [self._mark()]

    def end_work(self) -> None:
        """End the timing, before the backward pass in which gradients meet."""
        self._marks.append(self._mark())

    def work_seconds(self) -> float:
        """Return the seconds of the last step between the two; the GPU must have been waited for."""
        begin, end = self._marks
        if self.device.type == "cuda":
            return begin.elapsed_time(end) / 1000
        return end - begin

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # on the GPU's own clock: launching is no work
        return event

    def autocast(self) -> torch.autocast:
        """Run matmuls in the run's dtype; weights and everything that sums stay fp32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._dtype == "bf16")

    def sum_losses(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all processes' micro-batch losses, () nats."""
        if self._exact is not None:
            return self._exact.sum_losses(losses)
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss
        return self._runtime.sum(total)


def resolve_compile(
    wanted: Literal["auto", "on", "off"], *, device: torch.device, max_steps: int
) -> tuple[bool, str | None]:
    """Decide whether to compile, and say why not where that is not obvious.

    Raises: ConfigError if `on` cannot be honoured.
    """
    if wanted == "off" or (
        wanted == "auto" and device.type == "cpu" and max_steps < CPU_COMPILE_FROM_STEPS
    ):
        return False, None
    missing = _missing_for_compile(device)
    if missing and wanted == "on":
        raise ConfigError(f"compile on: {missing}; install it or use --compile off")
    if missing:
        return False, f"not compiling: {missing}; training is only slower"
    return True, None


def _missing_for_compile(device: torch.device) -> str | None:
    """Say what torch.compile lacks on this machine, or None; on a GPU Triton builds its launchers in C."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "no Triton (pip install triton)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        return "this GPU is older than Triton supports (compute capability 7.0)"
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++", "gcc", "cc")):
        return "no C++ compiler on the PATH"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h (install python3-dev)"
    return None
