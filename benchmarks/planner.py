"""How well the planner predicts step seconds: a probe its next steps, and fitted rates the steps of other shapes.

Times are processor seconds of one thread in fp32, because wall time says nothing where others use the machine.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from gpt2lab.config.schema import ModelConfig, OptimConfig, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.planner import hardware, machine, timing
from gpt2lab.planner.calibration import mean_step
from gpt2lab.planner.timing import MeasuredStep, fit_rates, work
from gpt2lab.training.train_step import train_step


@dataclass(frozen=True)
class Case:
    """A shape and how a step of it is cut: L layers, C wide, H heads, context T, vocabulary V, B x A sequences."""

    L: int
    C: int
    H: int
    T: int
    V: int
    B: int
    A: int

    @property
    def model(self) -> ModelConfig:
        """The shape as the model knows it."""
        return ModelConfig(
            n_layer=self.L,
            n_embd=self.C,
            n_head=self.H,
            context_length=self.T,
            vocab_size=self.V,
        )

    def __str__(self) -> str:
        return f"L{self.L} C{self.C} H{self.H} T{self.T} V{self.V} B{self.B} A{self.A}"


PROBED = (
    Case(2, 64, 2, 64, 1024, 8, 1),
    Case(2, 128, 4, 128, 4096, 4, 2),
    Case(4, 128, 4, 128, 2048, 4, 1),
    Case(2, 64, 2, 32, 16384, 4, 1),
    Case(6, 96, 3, 128, 1024, 2, 2),
    Case(1, 256, 4, 64, 8192, 4, 1),
)
# Wide, deep, long, many words, many micro-batches: what a machine's rates are fitted to.
FITTED = (
    *PROBED,
    Case(2, 256, 4, 128, 2048, 4, 1),
    Case(4, 256, 8, 64, 4096, 4, 1),
    Case(8, 64, 2, 128, 1024, 4, 1),
    Case(3, 192, 3, 256, 2048, 2, 1),
    Case(2, 128, 2, 512, 1024, 1, 1),
    Case(2, 384, 6, 64, 8192, 2, 1),
    Case(4, 192, 6, 128, 8192, 2, 2),
    Case(6, 128, 4, 64, 16384, 4, 1),
    Case(3, 64, 1, 256, 4096, 4, 1),
    Case(5, 160, 5, 96, 3072, 4, 1),
    Case(2, 320, 5, 128, 1024, 4, 2),
    Case(4, 96, 2, 192, 6144, 3, 1),
    Case(3, 256, 4, 32, 16384, 8, 1),
    Case(7, 112, 4, 160, 2048, 2, 1),
)
_WARMUP = 3  # steps
_FOLDS = 4


class _Runner:
    """Takes real training steps of one case and tells what each cost in processor seconds."""

    def __init__(self, case: Case) -> None:
        runtime = Runtime()
        runtime.use(SystemConfig(device="cpu"))
        self._strategy = Strategy(runtime, SystemConfig(dtype="fp32"))
        self._model = build_model(case.model, seed=0, device=runtime.device)
        self._optimizers = build_optimizers(self._model, OptimConfig())
        ids = torch.randint(case.V, (case.A, case.B, case.T + 1))
        micro = tuple(
            MicroBatch(rows[:, :-1], rows[:, 1:], index, index == case.A - 1)
            for index, rows in enumerate(ids)
        )
        samples = case.A * case.B
        self._batch = GlobalBatch(micro, samples * case.T, 0, 0, samples, None)
        self.steps(_WARMUP)

    def steps(self, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            began = time.process_time()
            train_step(
                self._model,
                self._optimizers,
                self._batch,
                1e-4,
                strategy=self._strategy,
                grad_clip=1.0,
                seed=0,
            )
            taken.append(time.process_time() - began)
        return taken


def measure_planner(*, probe_steps: int, steps: int) -> dict[str, Any]:
    """Predict `steps` steps from a probe of `probe_steps`, and each shape from rates fitted to the other folds'."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    watch = machine.Watch()
    try:
        probed = []
        for case in PROBED:
            runner = _Runner(case)
            predicted = steps * mean_step(runner.steps(probe_steps))
            probed.append(_row(case, predicted, sum(runner.steps(steps))))
        fitted = _predict_other_shapes(
            [(case, mean_step(_Runner(case).steps(probe_steps))) for case in FITTED]
        )
    finally:
        torch.set_num_threads(threads)
    return {
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "others": watch.others(),
        "probe_steps": probe_steps,
        "steps": steps,
        "probed": probed,
        "fitted": fitted,
    }


def _predict_other_shapes(measured: list[tuple[Case, float]]) -> list[dict[str, Any]]:
    seen = [
        MeasuredStep(work(case.model, micro_batch=case.B, accumulation=case.A), seconds)
        for case, seconds in measured
    ]
    prior = timing.processor(machine.core_flops(), hardware.load(), bf16=False, compiled=False)
    rows = []
    for number, (case, seconds) in enumerate(measured):
        others = [m for i, m in enumerate(seen) if i % _FOLDS != number % _FOLDS]
        predicted = fit_rates(prior, others, spread=1.0).seconds(seen[number].work)
        rows.append(_row(case, predicted, seconds))
    return rows


def _row(case: Case, predicted: float, actual: float) -> dict[str, Any]:
    error = predicted / actual - 1
    return {
        "case": str(case),
        "predicted_seconds": predicted,
        "actual_seconds": actual,
        "error": error,
    }


def describe(result: dict[str, Any]) -> str:
    """Write both tables as Markdown, each with the median and the 90th percentile of its errors."""
    titles = {
        "probed": f"A probe of {result['probe_steps']} steps and the next {result['steps']}",
        "fitted": "Shapes that the rates were not fitted to",
    }
    lines = []
    for key, title in titles.items():
        rows = result[key]
        lines += [f"{title}, milliseconds of processor time", ""]
        lines += ["| shape | predicted | actual | error |", "| --- | --- | --- | --- |"]
        for row in rows:
            predicted, actual = (1e3 * row[f"{name}_seconds"] for name in ("predicted", "actual"))
            lines.append(
                f"| {row['case']} | {predicted:.1f} | {actual:.1f} | {row['error']:+.1%} |"
            )
        errors = sorted(abs(row["error"]) for row in rows)
        high = errors[round(0.9 * (len(errors) - 1))]
        lines += ["", f"median error {statistics.median(errors):.1%}, p90 {high:.1%}", ""]
    others = result["others"]
    use = "unknown" if others is None else f"{others:.0%}"
    lines.append(f"one thread, fp32, torch {result['torch']}; others used {use} of the cores")
    return "\n".join(lines)
