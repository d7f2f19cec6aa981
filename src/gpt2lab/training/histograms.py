"""Histograms of every weight and gradient for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpt2lab.config.derived import is_due
from gpt2lab.model.gpt import GPT
from gpt2lab.runs.logger import MetricsLogger


@dataclass(frozen=True)
class Histograms:
    """The histograms of one run's model: every `freq` steps and after the last; freq 0 = never."""

    model: GPT
    logger: MetricsLogger
    freq: int
    last_step: int

    def parameters(self, step: int) -> None:
        """Record the weights after update `step`, if that is due."""
        self._record("Parameters", step, self.model.named_parameters())

    def gradients(self, step: int) -> float:
        """Record the gradients of update `step`, clipped, if that is due; return the seconds that it took."""
        began = time.monotonic()
        found = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        self._record("Gradients", step, found)
        return time.monotonic() - began

    def _record(self, kind: str, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.freq or not is_due(step, self.freq, self.last_step):
            return
        if not self.logger.takes_histograms:  # not rank 0
            return
        for name, tensor in tensors:
            values = tensor.detach().float().cpu()
            if torch.isfinite(values).all():  # others have no range
                self.logger.histogram(f"{kind}/{name}", step, values)
