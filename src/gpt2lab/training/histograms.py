"""How weights and gradients are distributed, tensor by tensor, for TensorBoard. Reads them and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpt2lab.config.derived import is_due
from gpt2lab.model.gpt import GPT
from gpt2lab.runs.logger import Histogram, Telemetry

_BINS = 64


def histogram(values: torch.Tensor) -> Histogram | None:
    """Count the values of a tensor of any shape; None if one of them is not finite.

    On the CPU, whatever the device: CUDA's own has no deterministic version, and a device near its limit no room.
    """
    flat = values.detach().flatten().float().cpu()
    low, high = (float(bound) for bound in flat.aminmax())
    if not torch.isfinite(flat).all():
        return None
    counts = torch.histc(flat, _BINS, low, high)  # a constant tensor: all in one bin around it
    double = flat.double()
    return Histogram(
        low=low,
        high=high,
        sum=float(double.sum()),
        sum_of_squares=float(double.square().sum()),
        counts=tuple(int(count) for count in counts),
    )


@dataclass(frozen=True)
class Histograms:
    """The histograms of one run's model: every `freq` steps and after the last; freq 0 = never."""

    model: GPT
    telemetry: Telemetry
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
        if not self.telemetry.takes_histograms:  # not the first process
            return
        for name, values in tensors:
            found = histogram(values)
            if found is not None:
                self.telemetry.histogram(f"{kind}/{name}", step, found)
