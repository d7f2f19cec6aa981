"""Forecasts of GPUs against runs that others published: speed, memory, and the width of the interval.

The interval's deviations are what runs miss by that a fit did not see. `-s` prints every run.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecasting import KNOWN, job_for, predict
from gpt2lab.planner import estimate, machine
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.job import Job

FILE = Path(__file__).parents[2] / "golden" / "published_runs.jsonl"
RUNS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]


def job_of(run: dict[str, Any]) -> Job:
    flags = {name: value for name, value in run["ask"].items() if name not in ("gpu", "gpus")}
    return job_for(world=run["ask"]["gpus"], **(flags | {"steps": str(flags["steps"])}))


def machine_of(run: dict[str, Any], job: Job, known: Hardware) -> machine.Machine:
    gpu, gpus = known.gpu(run["ask"]["gpu"]), run["ask"]["gpus"]
    return machine.named(gpu, known, gpus=gpus, compiled=job.compiled)


JOBS = [job_of(run) for run in RUNS]


def log_errors(known: Hardware, chosen: list[int]) -> np.ndarray:
    """Return the logarithm of predicted / published tokens a second of the chosen runs."""
    errors = []
    for i in chosen:
        step = estimate.step_time(JOBS[i], machine_of(RUNS[i], JOBS[i], known))[0]
        rate = step.inverse_of(JOBS[i].config.batch.total_batch_size / JOBS[i].world_size)
        errors.append(math.log(rate.value / RUNS[i]["tokens_per_second_per_gpu"]))
    return np.array(errors)


def test_published_runs_are_predicted():
    """Four in five are inside the 80 % interval, speed is within 18 % (rms), every memory within 15 % of its head's."""
    inside = 0
    for run, job in zip(RUNS, JOBS, strict=True):
        found = estimate.estimate(job, machine_of(run, job, KNOWN), KNOWN)
        published = run["tokens_per_second_per_gpu"] * job.world_size
        inside += found.throughput.low <= published <= found.throughput.high
        if run["memory_mib"]:
            logits = job.micro_batch * job.config.model.context_length * job.config.model.vocab_size
            theirs = found.memory.needed + 6 * logits  # which hold them and their gradients in fp32
            assert theirs / 2**20 == pytest.approx(run["memory_mib"], rel=0.15)
            assert found.memory.fits, run["name"]
    assert inside >= 0.8 * len(RUNS)
    errors = log_errors(KNOWN, list(range(len(RUNS))))
    assert math.sqrt(np.mean(errors**2)) <= 0.18


# Where the fit starts, and what holds what the runs do not decide. The last is the energy of Ada's matmuls.
START = {
    **{"matmul_efficiency": 0.9, "stream_bytes_per_token_layer_channel": 67.0},
    "stream_bytes_per_logit": 10.0,
    "stream_seconds_per_token_layer_channel": 5.4e-11,
    **{"eager_bytes_factor": 3.4, "ada": 1.6e-12},
}
ADA = [name for name, gpu in KNOWN.gpus.items() if gpu.joules_per_flop == 1.55e-12]
BEND = 0.1  # errors beyond count linearly, so that runs of old software do not bend all others


def fitted(chosen: list[int]) -> dict[str, float]:
    """Return START's constants for the chosen runs: least squares of log errors, large ones damped (Huber)."""
    start = np.log(list(START.values()))
    x = start.copy()
    for _ in range(8):
        errors = log_errors(hardware_with(x), chosen)
        slopes = np.array(
            [(log_errors(hardware_with(x + d), chosen) - errors) / 1e-4 for d in 1e-4 * np.eye(6)]
        ).T
        weights = np.minimum(1, BEND / np.maximum(np.abs(errors), 1e-9)) / 0.1**2
        matrix = slopes.T @ (weights[:, None] * slopes) + np.eye(6) / 0.3**2
        x -= np.linalg.solve(matrix, slopes.T @ (weights * errors) + (x - start) / 0.3**2)
    return dict(zip(START, np.exp(x).tolist(), strict=True))


def hardware_with(logarithms: np.ndarray) -> Hardware:
    values = dict(zip(START, np.exp(logarithms).tolist(), strict=True))
    joules = values.pop("ada")
    of_ada = {n: dataclasses.replace(KNOWN.gpus[n], joules_per_flop=joules) for n in ADA}
    return dataclasses.replace(KNOWN, gpus=KNOWN.gpus | of_ada, constants=KNOWN.constants | values)


def test_the_constants_are_the_fit_and_the_intervals_are_what_runs_left_out_miss_by():
    everything = list(range(len(RUNS)))
    fit = fitted(everything)
    assert fit.pop("ada") == pytest.approx(1.55e-12, rel=0.04)
    assert fit == pytest.approx({name: KNOWN.constants[name] for name in fit}, rel=0.04)
    missed: dict[bool, list[float]] = {True: [], False: []}
    for i in everything:
        without = fitted([j for j in everything if j != i])
        (error,) = log_errors(hardware_with(np.log(list(without.values()))), [i])
        is_measured = KNOWN.gpu(RUNS[i]["ask"]["gpu"]).matmul_flops is not None
        missed[is_measured].append(error)
        print(f"{RUNS[i]['name']:28} {RUNS[i]['tokens_per_second_per_gpu']:9,} {error:+.3f}")
    for is_measured, name in ((True, "sigma_roofline"), (False, "sigma_roofline_unmeasured")):
        scatter = math.sqrt(np.mean(np.square(missed[is_measured])))
        print(f"{name}: {scatter:.3f} of {len(missed[is_measured])} runs")
        assert KNOWN.constants[name] == pytest.approx(scatter, abs=0.01)


def test_small_work_is_slower_than_large_and_the_interval_says_how_little_is_known_of_it():
    """Launching kernels costs the same for one sequence and for many.

    It depends on the host's processor; the published runs are of work that hides it.
    """

    def rate(gpu: str, **flags: object) -> float:
        return predict(gpu, steps="1000", **flags).throughput.value

    assert rate("H100", mini_batch_size=1) < 0.6 * rate("H100", mini_batch_size=64)
    sizes = [rate("B200", mini_batch_size=size) for size in (1, 2, 4, 8, 16, 32, 64)]
    assert sizes == sorted(sizes)
    assert rate("H100", model="gpt2-nano") < 2e6
    names = ("gpt2-micro", "gpt2-mini", "gpt2")
    mfu = [predict("H100", model=m, steps="9").mfu or 0 for m in names]
    assert mfu == sorted(mfu)
    nano, gpt2 = (predict("H100", model=m, steps="9").sigma for m in ("gpt2-nano", "gpt2"))
    assert gpt2 == pytest.approx(KNOWN.constants["sigma_roofline"], rel=0.05)
    assert nano > 2 * gpt2


def test_the_power_of_a_board_limits_its_matmuls():
    """PCIe cards of a chip do not reach its data sheet: 350 W pay for half of what an H100 has on it."""
    names = ("H100", "H100-PCIe", "L4")
    known = {name: KNOWN.gpu(name).sustained_flops(1.0) or 0 for name in names}
    assert known["H100"] == 794.5e12  # measured
    assert known["H100-PCIe"] == pytest.approx(350 / 0.88e-12)
    assert known["L4"] < 0.5 * 121e12


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_compiled_step_on_a_gpu_holds_2_bytes_a_logit_and_an_uncompiled_one_12(recompute):
    flags = {"mini_batch_size": 8, "steps": "9", "activation_checkpointing": recompute}
    logits = 8 * 1024 * 50304
    eager = job_for(compile="off", **flags).memory(on_gpu=True)
    compiled = job_for(compile="on", **flags)
    saved = eager.tensors - compiled.memory(on_gpu=True).tensors
    assert saved == pytest.approx(10 * logits, rel=0.05)  # the head's gradients come there
    assert compiled.memory(on_gpu=False) == eager  # a CPU's formula
    # What an H200 needed, in docs/cards: 28,624,824,832 bytes of tensors.
    job = job_for(compile="on", mini_batch_size=64, total_batch_size=524288, steps="9")
    assert 1 <= job.memory(on_gpu=True).tensors / 28_624_824_832 < 1.1
