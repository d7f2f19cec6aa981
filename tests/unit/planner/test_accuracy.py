"""How well real steps are predicted, by processor time: wall time says nothing where others use the machine.

`python tests/unit/planner/test_accuracy.py` prints the tables of docs/planning.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))  # for `python tests/...`

import pytest
import torch

from gpt2lab.config.schema import ModelConfig, OptimConfig, SystemConfig
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.planner import hardware, machine, timing
from gpt2lab.planner.calibration import mean_step
from gpt2lab.planner.machine import BUSY, Watch
from gpt2lab.planner.timing import Measured, fit, work
from gpt2lab.training.train_step import train_step
from one_process import CPU, Alone, batch_of, shape

Case = tuple[ModelConfig, int, int]  # model, micro-batch, accumulation

PROBED: list[Case] = [
    (shape(2, 64, 2, 64, 1024), 8, 1),
    (shape(2, 128, 4, 128, 4096), 4, 2),
    (shape(4, 128, 4, 128, 2048), 4, 1),
    (shape(2, 64, 2, 32, 16384), 4, 1),
    (shape(6, 96, 3, 128, 1024), 2, 2),
    (shape(1, 256, 4, 64, 8192), 4, 1),
]
# Wide, deep, long, many words, many micro-batches: what a machine's rates are fitted to.
FITTED: list[Case] = [
    *PROBED,
    (shape(2, 256, 4, 128, 2048), 4, 1),
    (shape(4, 256, 8, 64, 4096), 4, 1),
    (shape(8, 64, 2, 128, 1024), 4, 1),
    (shape(3, 192, 3, 256, 2048), 2, 1),
    (shape(2, 128, 2, 512, 1024), 1, 1),
    (shape(2, 384, 6, 64, 8192), 2, 1),
    (shape(4, 192, 6, 128, 8192), 2, 2),
    (shape(6, 128, 4, 64, 16384), 4, 1),
    (shape(3, 64, 1, 256, 4096), 4, 1),
    (shape(5, 160, 5, 96, 3072), 4, 1),
    (shape(2, 320, 5, 128, 1024), 4, 2),
    (shape(4, 96, 2, 192, 6144), 3, 1),
    (shape(3, 256, 4, 32, 16384), 8, 1),
    (shape(7, 112, 4, 160, 2048), 2, 1),
]


class Runner:
    """Takes real training steps of one shape and tells what each cost in processor seconds."""

    def __init__(self, case: Case) -> None:
        config, B, A = case
        self.model = build_model(config, seed=0, device=CPU)
        self.optimizers = build_optimizers(self.model, OptimConfig(), device=CPU)
        self.batch = batch_of(config, B, A)

    def steps(self, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            began = time.process_time()
            train_step(
                self.model,
                self.optimizers,
                self.batch,
                1e-4,
                strategy=Alone("fp32"),  # type: ignore[arg-type]
                grad_clip=1.0,
                seed=0,
            )
            taken.append(time.process_time() - began)
        return taken


@pytest.fixture(autouse=True, scope="module")
def _as_the_trainer_runs() -> None:
    use_cpu()


def use_cpu() -> None:
    """Set up allocator and kernels as a start of the trainer does; page faults would be a cost of their own."""
    Runtime().use(SystemConfig(device="cpu"))


def name(case: Case) -> str:
    c, B, A = case
    return f"L{c.n_layer} C{c.n_embd} H{c.n_head} T{c.context_length} V{c.vocab_size} B{B} A{A}"


def probe_and_run(case: Case) -> tuple[float, float]:
    """Return (predicted, actual) processor seconds of 100 steps that follow a probe."""
    runner = Runner(case)
    runner.steps(3)
    probe = mean_step(runner.steps(40))
    return 100 * probe, sum(runner.steps(100))


def measure(case: Case) -> float:
    """Return the processor seconds of a step."""
    runner = Runner(case)
    runner.steps(3)
    return mean_step(runner.steps(15))


def across_shapes(
    cases: list[Case], seconds: list[float], folds: int = 4
) -> list[tuple[Case, float, float]]:
    """Return (case, predicted, actual) step seconds, each predicted from runs of the other folds' shapes."""
    seen = [
        Measured(work(config, micro_batch=B, accumulation=A), taken)
        for (config, B, A), taken in zip(cases, seconds, strict=True)
    ]
    prior = timing.processor(machine.core_flops(), hardware.load(), bf16=False)
    if __name__ == "__main__":
        print(fit(prior, seen, spread=1.0).seconds_per_unit, machine.core_flops())
    rows = []
    for fold in range(folds):
        others = [m for i, m in enumerate(seen) if i % folds != fold]
        rates = fit(prior, others, spread=1.0)
        rows += [
            (case, rates.seconds(m.work), m.seconds)
            for i, (case, m) in enumerate(zip(cases, seen, strict=True))
            if i % folds == fold
        ]
    return rows


# A neighbour on the same core or cache adds to what a step takes, for seconds, and is no error of the forecast: what
# misses is measured again. The bounds hold for one attempt alone; where others stay, nothing can be said.
ATTEMPTS = 4


def skip_if_others_worked(watch: Watch) -> None:
    others = watch.others()
    if others is None or others > BUSY:
        pytest.skip(f"others used {others} of the cores: processor time is not the machine's own")


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("case", PROBED, ids=name)
def test_a_probe_predicts_the_next_hundred_steps(case: Case) -> None:
    watch = Watch()
    for _ in range(ATTEMPTS):
        predicted, actual = probe_and_run(case)
        if predicted == pytest.approx(actual, rel=0.10):
            return
    skip_if_others_worked(watch)
    assert predicted == pytest.approx(actual, rel=0.10)


@pytest.mark.alone
@pytest.mark.slow
def test_rates_fitted_to_some_shapes_predict_others() -> None:
    watch = Watch()
    least = [float("inf")] * len(FITTED)
    for _ in range(ATTEMPTS):
        least = [min(so_far, measure(case)) for so_far, case in zip(least, FITTED, strict=True)]
        middle, high = median_and_p90(across_shapes(FITTED, least))
        if middle <= 0.05 and high <= 0.10:
            return
    skip_if_others_worked(watch)
    assert middle <= 0.05
    assert high <= 0.10


def median_and_p90(rows: list[tuple[Case, float, float]]) -> tuple[float, float]:
    """Return two quantiles of how far the predicted seconds are from the actual ones, relative."""
    errors = sorted(abs(predicted / actual - 1) for _, predicted, actual in rows)
    return statistics.median(errors), errors[round(0.9 * (len(errors) - 1))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    use_cpu()
    print(f"load average {os.getloadavg()[0]:.2f}, 1 thread, torch {torch.__version__}")
    if "probe" in sys.argv:
        for case in PROBED:
            predicted, actual = probe_and_run(case)
            print(
                f"| {name(case)} | {predicted:.2f} | {actual:.2f} | {predicted / actual - 1:+.1%} | "
                f"{os.getloadavg()[0]:.2f} |"
            )
    if "fit" in sys.argv:
        rows = across_shapes(FITTED, [measure(case) for case in FITTED])
        for case, predicted, actual in rows:
            print(
                f"| {name(case)} | {1000 * predicted:.1f} | {1000 * actual:.1f} | {predicted / actual - 1:+.1%} |"
            )
        middle, high = median_and_p90(rows)
        print(f"median {middle:.1%}, p90 {high:.1%}")
