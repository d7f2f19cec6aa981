"""How one model trains on many ranks: transformations of a plain module, in a fixed order."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gpt2lab.config.derived import compiles_by_region
from gpt2lab.config.schema import ActivationCheckpointing, SystemConfig
from gpt2lab.distributed import fsdp, zero1
from gpt2lab.distributed.compilation import compile_step
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.sharding import local_rows, rows_of, sharded
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.optimizers import LossScale, sum_of_squares


@dataclass(frozen=True)
class DeviceMark:
    """A place in a GPU's queue of work; on a CPU all work before it is done at once."""

    _moment: float
    _event: torch.cuda.Event | None

    def has_passed(self) -> bool:
        """Tell whether all work before it is done."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until all work before it is done."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceMark) -> float:
        """Return the seconds between two marks that have passed, by the GPU's clock: launching kernels is not work."""
        if self._event is None or earlier._event is None:
            return self._moment - earlier._moment
        return earlier._event.elapsed_time(self._event) / 1000


class Numbers:
    """Numbers on their way from the device."""

    def __init__(self, values: list[torch.Tensor], arrived: DeviceMark) -> None:
        """`values`: each () on the host, complete once `arrived` has passed."""
        self._values, self.arrived = values, arrived

    @functools.cached_property
    def values(self) -> list[float]:
        """The numbers; waits for them."""
        self.arrived.wait()
        return [value.item() for value in self._values]


# Activation checkpointing `selective` keeps the results of matrix products and attention. Norms, GELU and sums cost
# little to recompute.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
_KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (*_PRODUCTS, *(f"_scaled_dot_product_{kernel}" for kernel in _ATTENTION))
]


def apply_activation_checkpointing(model: GPT, mode: ActivationCheckpointing) -> None:
    """Make each block keep only its input (`block`), or also its matrix products (`selective`), in place.

    The backward pass recomputes the rest. Results are bit-identical, dropout included; only memory and time differ.
    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": model.config.dropout > 0,
    }
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    for block in model.blocks:
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(
    forward: Callable[..., torch.Tensor], options: dict[str, Any]
) -> Callable[..., torch.Tensor]:
    def run(*args: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():  # evaluation and sampling keep nothing anyway
            return forward(*args)
        result: torch.Tensor = checkpoint(forward, *args, **options)
        return result

    return run


class Strategy:
    """Activation checkpointing, compilation, then distribution; and the points of a step where ranks communicate."""

    def __init__(
        self, runtime: Runtime, system: SystemConfig, *, full_gradients: bool = False
    ) -> None:
        """`system`: with dtype decided; it compiles only where `compile` is on. One rank needs no `parallel`.

        `full_gradients`: under zero1 every rank gets all of them, for histograms.
        """
        self.device = runtime.device
        self.runtime, self._system = runtime, system
        self._parallel = system.parallel if runtime.is_distributed else "ddp"
        self._exact = ExactReduction(runtime) if system.reduce == "exact" else None
        # Gradients are then summed only in this rank's rows; zero1.py says why not between CPUs.
        needs_rows = self._parallel == "zero1" and self._exact is None and not full_gradients
        self._scatters = needs_rows and self.device.type == "cuda"
        self._by_region = self._parallel == "fsdp"  # of any model; `prepare` knows the model
        # DDP and FSDP average gradients over ranks, and the loss is a sum over all: it is scaled up by this.
        self._averaged_over = 1 if self._exact else runtime.world_size
        self.loss_scale = LossScale(self.device) if system.dtype == "fp16" else None

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.runtime.world_size,))

    def prepare(
        self, model: GPT, to_train: Callable[[GPT], nn.Module] = lambda model: model
    ) -> nn.Module:
        """Return the module to train; `model` keeps its parameters' names, under fsdp only this rank's rows.

        `to_train` may wrap the model in another module, whose forward returns the loss.
        """
        model.residual_dtype = self._system.residual_dtype
        if self._parallel == "fsdp":
            self._bare = fsdp.skeleton(model)
        trained = to_train(model)
        apply_activation_checkpointing(model, self._system.activation_checkpointing)
        self._by_region = compiles_by_region(model.config.n_layer, self._parallel)
        if self._system.compile == "on":
            compile_step(model, trained, by_region=self._by_region)
        if self._parallel == "fsdp":
            fsdp.shard(
                model,
                trained,
                self._mesh,
                offload=self._system.fsdp_offload,
                param_dtype=self._system.fsdp_param_dtype,
            )
        elif self.runtime.is_distributed and self._exact is None:
            replicated = DistributedDataParallel(
                trained, gradient_as_bucket_view=True, bucket_cap_mb=self._system.ddp_bucket_mb
            )
            if self._scatters:
                zero1.scatter_gradients(replicated, self._mesh)
            return replicated
        return trained

    def shard_optimizer_state(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """Return optimizers that hold only this rank's state, in place of fresh ones of the prepared model."""
        if self._parallel == "zero1":
            # DDP's are views of its buckets.
            stay = self._exact is None
            return zero1.shard_optimizer_state(model, optimizers, self._mesh, gradients_stay=stay)
        if self._parallel == "fsdp":
            return [sharded(optimizer, self._mesh) for optimizer in optimizers]
        return optimizers

    @contextlib.contextmanager
    def full_model(self, model: GPT) -> Iterator[GPT]:
        """Yield the model with all its weights, to evaluate or to sample; all ranks enter together."""
        if self._parallel == "fsdp":
            yield fsdp.gather_model(model, self._bare, self._mesh, self.device)
        else:
            yield model

    @property
    def compiles_evaluation(self) -> bool:
        """Tell whether evaluations run compiled.

        Not on a CPU, where the numbers are those of `gpt2lab evaluate` to the bit; not where the step is compiled by
        region: a deep model's graph would compile for minutes, and under fsdp each evaluation gathers its own model.
        """
        is_on_gpu = self._system.compile == "on" and self.device.type == "cuda"
        return is_on_gpu and not self._by_region

    def for_evaluation(
        self, function: Callable[..., torch.Tensor], *, batch_size: int
    ) -> Callable[..., torch.Tensor]:
        """Return `function` of a model and ids (B, T), B up to `batch_size`, compiled where the step on a GPU is.

        A smaller batch is filled up with id 0 and its result cut, so that one shape is compiled, once.
        """
        if not self.compiles_evaluation:
            return function
        compiled = torch.compile(function, dynamic=False)

        def filled(model: GPT, ids: torch.Tensor, *more: Any) -> torch.Tensor:
            missing = batch_size - len(ids)
            return compiled(model, nn.functional.pad(ids, (0, 0, 0, missing)), *more)[: len(ids)]

        return filled

    def loss_factor(self, num_targets: int) -> float | torch.Tensor:
        """Return what each loss is multiplied by before the backward pass; `num_targets` are the global batch's.

        In fp16 `clip_grad_norm` makes the average over the ranks a sum: its range is no wider for more of them.
        """
        scale = self.loss_scale.scale if self.loss_scale else self._averaged_over
        return scale / num_targets

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Undo fp16's loss scale, clip the global gradient to `max_norm`, return its L2 norm before, () float32.

        It is multiplied by max_norm / norm where that is below 1, as torch.nn.utils.clip_grad_norm_ does.
        """
        gradients = [rows_of(p.grad) for p in model.parameters() if p.grad is not None]
        if self._scatters:
            gradients = [local_rows(g, self._mesh) for g in gradients]
        if self.loss_scale is not None:
            scale = self.loss_scale.scale / self._averaged_over
            torch._foreach_div_(gradients, scale.to(gradients[0].device))
        squares = sum_of_squares(gradients)
        if self._parallel == "fsdp" or self._scatters:
            dist.all_reduce(squares)  # of offloaded rows by gloo: the group has both backends
        norm = squares.sqrt()
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0).float())
        return norm.float()

    def warm_up_reducer(self, model: nn.Module, *, batch_size: int, context_length: int) -> None:
        """Run two backward passes and discard their gradients, so that the first step sums like all others.

        After its first backward pass DDP regroups gradients into other buckets. With three or more ranks, the first
        step after a resume would otherwise add in another order than the same step of an uninterrupted run.
        """
        if not isinstance(model, DistributedDataParallel):
            return
        tokens = torch.zeros(batch_size, context_length, dtype=torch.int64, device=self.device)
        targets = tokens.clone()  # one tensor as both would be a case of its own for torch.compile
        for _ in range(2):
            with self.autocast():
                loss = model(tokens, targets)
            loss.backward()
        self.clear_gradients(model)

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[None]:
        """Reduce gradients in the last micro-batch only; under fsdp those of the blocks in each (see fsdp.py).

        The context must cover the forward pass too: there DDP decides whether the backward pass will all-reduce.
        """
        if self._exact is not None:
            return self._exact.micro_batch(model, is_last=enabled)
        if self._parallel == "fsdp":
            fsdp.keep_unsharded(model, after_backward=not enabled)
        if enabled or not isinstance(model, DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()

    def clear_gradients(self, model: nn.Module) -> None:
        """Clear the gradients for the next step.

        DDP's are views of its buckets and are set to zero instead of None: else the micro-batches before the last would
        sum into memory of their own, as much again.
        """
        if isinstance(model, DistributedDataParallel):
            torch._foreach_zero_([p.grad for p in model.parameters() if p.grad is not None])
        else:
            model.zero_grad()

    def mark(self) -> DeviceMark:
        """Mark where the device's queue ends now."""
        if self.device.type != "cuda":
            return DeviceMark(time.monotonic(), None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return DeviceMark(time.monotonic(), event)

    def send_to_host(self, *values: torch.Tensor) -> Numbers:
        """Begin to copy numbers, each (), to the host."""
        # From a GPU: pinned. On a CPU copies too: the loss scale changes in place.
        on_host = [value.to("cpu", non_blocking=True, copy=True) for value in values]
        return Numbers(on_host, self.mark())

    def autocast(self) -> torch.autocast:
        """Run matrix products in the run's dtype; weights and sums stay fp32."""
        dtype = torch.float16 if self._system.dtype == "fp16" else torch.bfloat16
        enabled = self._system.dtype in ("bf16", "fp16")
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled)

    def sum_losses(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all ranks' micro-batch losses, () nats."""
        if self._exact is not None:
            return self._exact.sum_losses(losses)
        return self.runtime.sum_over_ranks(sum(losses, torch.zeros((), device=self.device)))


class ExactReduction:
    """Collects the gradients of this rank's micro-batches and sums those of all ranks in global order.

    So 1, 2 or 4 ranks give the same bits. A single process adds its micro-batches' gradients one after another. Here
    each rank keeps the gradients of its micro-batches apart; the running sum goes from rank to rank, each adds its own
    in order, and the last broadcasts the total. One rank adds at a time, and it holds one gradient per micro-batch.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: list[torch.Tensor] = []  # each (number of parameters,), in order

    @contextmanager
    def micro_batch(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Wrap one forward and backward pass; after the last one every rank holds the full sum."""
        yield
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self._kept.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for parameter in parameters:
            parameter.grad = None
        if is_last:
            total, self._kept = self._sum_in_order(self._kept), []
            sums = torch.split(total, [parameter.numel() for parameter in parameters])
            for parameter, gradient in zip(parameters, sums, strict=True):
                parameter.grad = gradient.view_as(parameter)

    def _sum_in_order(self, kept: list[torch.Tensor]) -> torch.Tensor:
        rank, last = self._runtime.rank, self._runtime.world_size - 1
        if rank == 0:
            total, rest = kept[0], kept[1:]
        else:
            total, rest = torch.empty_like(kept[0]), kept
            dist.recv(total, src=rank - 1)
        for gradient in rest:
            total += gradient
        if rank < last:
            dist.send(total, dst=rank + 1)
        if self._runtime.is_distributed:
            dist.broadcast(total, src=last)
        return total

    def sum_losses(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all micro-batches' losses, () nats, in global order."""
        return sum(torch.cat(self._runtime.gather(torch.stack(losses).cpu())), torch.zeros(()))
