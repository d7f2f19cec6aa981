"""One optimizer step on one global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.strategy import DeviceMark, Numbers, Strategy
from gpt2lab.errors import PartialUpdateError
from gpt2lab.model.rng import fold_seed
from gpt2lab.optim.optimizers import reject_on_device, set_learning_rate


@dataclass(frozen=True)
class StepStats:
    """The results of one step. A GPU may still be computing it; reading a number waits for that number."""

    # Loss, gradient norm and fp16's `loss_scale`; they arrive before the update begins.
    numbers: Numbers
    accepted: bool | None  # None: the device decides
    # Around this rank's own work; in the rest of a step ranks wait for each other.
    work: tuple[DeviceMark, DeviceMark]
    done: DeviceMark  # passed after the update

    @property
    def loss(self) -> float:
        """Nats/token, mean over the global batch, of the weights before the update."""
        return self.numbers.values[0]

    @property
    def grad_norm(self) -> float:
        """L2, before clipping."""
        return self.numbers.values[1]

    @property
    def updated(self) -> bool:
        """False: the update was skipped, weights and moments are as before."""
        return is_finite(self.loss, self.grad_norm) if self.accepted is None else self.accepted

    @property
    def loss_scale(self) -> tuple[float, ...] | None:
        """Of fp16, after this step, as LossScale.restore takes it; None in other dtypes."""
        return tuple(self.numbers.values[2:]) or None

    @property
    def overflowed(self) -> bool:
        """Tell whether the loss is finite, its gradient is not, and a loss scale of 1 or more was halved."""
        is_halved = self.loss_scale is not None and self.loss_scale[0] >= 0.5
        return is_halved and math.isfinite(self.loss) and not math.isfinite(self.grad_norm)

    @property
    def work_seconds(self) -> float:
        """Seconds of this rank's own work."""
        began, ended = self.work
        return ended.seconds_since(began)


def is_finite(loss: float, grad_norm: float) -> bool:
    """Accept an update unless the loss or the gradient is NaN or infinite."""
    return math.isfinite(loss) and math.isfinite(grad_norm)


def train_step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: GlobalBatch,
    lr: float,
    *,
    strategy: Strategy,
    grad_clip: float,
    seed: int,
    accept: Callable[[float, float], bool] | None = is_finite,
    before_update: Callable[[], None] = lambda: None,
    after_update: Callable[[], None] = lambda: None,
) -> StepStats:
    """Take one optimizer step and return the loss and gradient norm before it.

    The loss is a sum over target tokens, divided once by the number of targets in the *global* batch. It therefore
    depends neither on the world size nor on the micro-batch size, up to the order of floating-point sums. `seed` is
    the step's own: dropout belongs to the micro-batch, not to the rank.

    `accept(loss, grad_norm)` decides before the weights change; both are global, so all ranks decide alike. None: the
    device rejects what is not finite, and nothing here waits for it.

    Raises: PartialUpdateError if the optimizer failed half-way.
    """
    set_learning_rate(optimizers, lr)
    began = ready = strategy.mark()
    scale = strategy.loss_factor(batch.num_targets)
    losses = []  # each () nats, summed over (B, T)

    for micro in batch.micro_batches:  # this rank's share, in global order
        torch.manual_seed(fold_seed(seed, micro.index))
        with strategy.grad_sync(model, enabled=micro.is_last):
            with strategy.autocast():
                loss = model(micro.tokens, micro.targets)
            if micro.is_last:
                ready = strategy.mark()  # before the backward pass that reduces gradients
            (loss * scale).backward()
        losses.append(loss.detach())

    max_norm = grad_clip if grad_clip > 0 else math.inf
    norm = strategy.clip_grad_norm(model, max_norm)  # () L2 before clipping
    mean_loss = strategy.sum_losses(losses) / batch.num_targets
    new_scale = () if strategy.loss_scale is None else strategy.loss_scale.update(norm)
    numbers = strategy.send_to_host(mean_loss, norm, *new_scale)
    accepted = None if accept is None else accept(*numbers.values[:2])
    before_update()
    try:
        if accepted is None:
            reject_on_device(optimizers, (mean_loss, norm))
        if accepted is not False:
            for optimizer in optimizers:
                optimizer.step()
        after_update()
        strategy.clear_gradients(model)
    except Exception as error:
        raise PartialUpdateError(f"the optimizer failed half-way: {error}") from error
    return StepStats(numbers, accepted, work=(began, ready), done=strategy.mark())
