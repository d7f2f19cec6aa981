"""The mean of a run's last weights, kept beside the moments of each weight: saved, sharded and resumed like them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from gpt2lab.checkpoint.store import AVERAGE, parameters_of
from gpt2lab.distributed.sharding import full_tensor, rows_of
from gpt2lab.training.start import Start


class TailAverage:
    """The mean of the weights after each step past `begin`, which is None without --average_tail."""

    def __init__(
        self, start: Start, model: nn.Module, optimizers: list[torch.optim.Optimizer], *, done: int
    ) -> None:
        """Continue the mean that was loaded after step `done` if no step before the tail is in it, else begin anew."""
        self._model, self._optimizers = model, optimizers
        steps, share = start.plan.max_steps, start.config.optim.average_tail
        tail = steps - max(1, round(share * steps))
        saved = start.checkpoint.manifest.get("average_from") if start.checkpoint else None
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        continues = share > 0 and saved is not None and tail <= saved < done
        if not continues or not any(AVERAGE in state for state in states):
            saved = max(tail, done) if share > 0 else None
            for state in states:
                state.pop(AVERAGE, None)
        self.begin = saved

    def num_steps(self, step: int) -> int:
        """Count the steps in the mean after `step`."""
        return 0 if self.begin is None else max(0, step - self.begin)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` to the mean, only this rank's rows; nothing waits for the device."""
        held = [pair for optimizer in self._optimizers for pair in optimizer.state.items()]
        if not self.num_steps(step):
            return
        if not held:  # no state: every step so far was skipped
            self.begin = step
            return
        means, weights = [], []
        for weight, state in held:
            if AVERAGE not in state:
                state[AVERAGE] = weight.detach().clone()
            means.append(rows_of(state[AVERAGE]))
            weights.append(rows_of(weight.detach()))
        torch._foreach_lerp_(means, weights, 1 / self.num_steps(step))

    @contextlib.contextmanager
    def in_weights(self) -> Iterator[None]:
        """Swap the weights with their mean, and back afterwards to the same bits; all ranks enter together."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        parameters = dict(self._model.named_parameters())
        for optimizer in self._optimizers:
            for name, own in parameters_of(optimizer, self._model):
                mean, weight = optimizer.state[own][AVERAGE], own.detach().clone()
                own.copy_(mean)
                mean.copy_(weight)
                if parameters[name] is not own:  # zero1: rows of a replica
                    parameters[name].copy_(full_tensor(own.detach()))
