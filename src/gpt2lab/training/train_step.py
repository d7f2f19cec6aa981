"""One optimizer step on one global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import TornUpdateError
from gpt2lab.model.rng import fold_seed
from gpt2lab.optim.optimizers import set_learning_rate


@dataclass(frozen=True)
class StepStats:
    """The numbers of one step."""

    loss: float  # nats/token, mean over the global batch, of the weights before the update
    grad_norm: float  # L2, before clipping
    updated: bool  # False: the update was skipped, weights and moments are as before


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
    accept: Callable[[float, float], bool] = is_finite,
) -> StepStats:
    """Take one optimizer step and return the loss and gradient norm before it.

    The loss is a sum over target tokens, divided once by the number of targets in the *global* batch. It therefore
    depends neither on the world size nor on the micro-batch size, up to the order of floating-point sums. `seed` is
    the step's own: dropout belongs to the micro-batch, not to the rank.

    `accept(loss, grad_norm)` decides before the weights change; both are global, so all ranks decide alike.

    Raises: TornUpdateError if the optimizer failed half-way.
    """
    set_learning_rate(optimizers, lr)
    strategy.begin_work()
    scale = strategy.averaged_over / batch.num_targets
    losses = []  # each () nats, summed over (B, T)

    for micro in batch.micro_batches:  # this rank's share, in global order
        torch.manual_seed(fold_seed(seed, micro.index))
        with strategy.grad_sync(model, enabled=micro.is_last):
            with strategy.autocast():
                loss = model(micro.tokens, micro.targets)
            if micro.is_last:
                strategy.end_work()
            (loss * scale).backward()
        losses.append(loss.detach())

    max_norm = grad_clip if grad_clip > 0 else math.inf
    norm = strategy.clip_grad_norm(model, max_norm)  # () L2 before clipping
    loss_value = (strategy.sum_losses(losses) / batch.num_targets).item()  # sync
    norm_value = norm.item()
    accepted = accept(loss_value, norm_value)
    try:
        for optimizer in optimizers if accepted else []:
            optimizer.step()
        strategy.clear_gradients(model)
    except Exception as error:
        raise TornUpdateError(f"the optimizer failed half-way: {error}") from error
    return StepStats(loss=loss_value, grad_norm=norm_value, updated=accepted)
