"""What must be true of any forecast: windows, scaling, loss."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from forecasting import KNOWN, job_for, on, predict
from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import OptimConfig
from gpt2lab.config.settings import override
from gpt2lab.model.counts import checkpoint_bytes
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.muon import NEWTON_SCHULZ
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.planner import estimate as estimating
from gpt2lab.planner import hardware, timing
from gpt2lab.planner.estimate import effective_tokens, estimate, predicted_loss, verdict
from gpt2lab.planner.job import Job
from gpt2lab.training.progress import Interval, total

examples = rules(derandomize=True, max_examples=60, deadline=None)
NVLINK = ("A100", "H100", "H200", "B200")


@examples
@given(
    gpu=st.sampled_from(["RTX-4090", *NVLINK]),
    model=st.sampled_from(["gpt2", "gpt2-medium", "gpt2-large"]),
    steps=st.integers(1, 10**6),
)
def test_parts_sum_to_the_total_and_steps_cost_in_proportion(gpu, model, steps):
    found = predict(gpu, model=model, steps=str(steps))
    parts = found.breakdown.values()
    assert found.seconds.value == pytest.approx(sum(part.value for part in parts))
    assert found.seconds.low <= found.seconds.value <= found.seconds.high
    double = predict(gpu, model=model, steps=str(2 * steps))
    assert double.breakdown["train"].value == pytest.approx(2 * found.breakdown["train"].value)
    assert double.seconds.value > found.seconds.value
    need = found.memory
    assert need.needed == pytest.approx(need.tensors.tensors + need.overhead)
    if found.cost is not None:
        hours = found.seconds.value / 3600
        assert found.cost.usd.value == pytest.approx(found.cost.price_per_gpu_hour * hours)


def test_regions_compile_in_the_same_time_at_any_depth():
    """One graph compiles for longer the deeper it is; docs/planning.md states the seconds."""

    def predicted(n_layer: int, **more: Any) -> float:
        return predict("H100", n_layer=n_layer, **more).breakdown["compile"].value

    assert predicted(6) < predicted(12) < predicted(REGIONS_FROM_LAYERS - 1)
    regions = predicted(REGIONS_FROM_LAYERS)
    assert regions == predicted(48) == predicted(12, gpus=2, parallel="fsdp") < predicted(6)
    assert (round(predicted(12)), round(regions)) == (56, 13)
    assert predicted(12, compile="off") < 1e-6


@pytest.mark.parametrize(
    ("n_layer", "is_cpu", "slower"),
    [
        (REGIONS_FROM_LAYERS - 1, False, 1),
        (REGIONS_FROM_LAYERS, False, 2),
        (REGIONS_FROM_LAYERS - 1, True, 2),
    ],
)
def test_evaluations_cost_more_only_where_they_run_uncompiled(n_layer, is_cpu, slower):
    """As Strategy.compiles_evaluation: on a GPU, unless the step is compiled by region."""
    constants = dict(KNOWN.constants)
    constants["eager_eval_factor"] *= 2
    machine = dataclasses.replace(on("H100"), is_cpu=is_cpu)
    job = job_for(n_layer=n_layer)
    dearer = dataclasses.replace(KNOWN, constants=constants)
    costs = (estimating.event_costs(job, machine, known) for known in (KNOWN, dearer))
    once, twice = (cost.seconds["eval"] for cost in costs)
    assert twice == pytest.approx(slower * once)


@pytest.mark.parametrize(
    ("asked", "is_cpu", "writes"),
    [("auto", False, 1), ("on", True, 1), ("auto", True, 5), ("off", False, 5)],
)
def test_training_waits_only_for_the_last_save_if_a_process_writes(asked, is_cpu, writes):
    more = {"async_checkpoint": asked, "checkpoint_freq": 20, "eval_freq": 0}
    config = override(job_for().config, more)
    job = Job(config, max_steps=100, world_size=1, dtype="bf16", compiled=True)
    machine = dataclasses.replace(on("H100"), is_cpu=is_cpu)
    seconds = estimating.event_costs(job, machine, KNOWN).seconds["checkpoint"]
    size, k = checkpoint_bytes(job.config), KNOWN.constants
    written, copied = (size / k[f"checkpoint_{x}bytes_per_second"] for x in ("", "copy_"))
    assert 5 * seconds == pytest.approx(writes * written + (5 - writes) * copied)


@pytest.mark.parametrize("gpu", NVLINK)
@pytest.mark.parametrize("model", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_more_cards_are_never_slower_on_nvlink(gpu, model):
    how = {"model": model, "mini_batch_size": 4, "tokens": "10B"}
    times = [predict(gpu, gpus=n, **how).step.value for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[-1] <= 8


@examples
@given(hours=st.floats(0.2, 400), gpu=st.sampled_from(["RTX-4090", "A100", "H100"]))
def test_a_run_fits_exactly_if_its_upper_bound_is_within_the_budget(hours, gpu):
    window = estimating.Window(3600 * hours, 300.0)
    job, where = job_for(tokens="10B"), on(gpu)
    found = estimate(job, where, KNOWN)
    assert (verdict(found, window) == "fits") == (found.seconds.high <= window.budget)
    steps = estimating.steps_that_fit(job, window, lambda other: estimate(other, where, KNOWN))
    if steps:
        assert estimate(job.with_steps(steps), where, KNOWN).seconds.high <= window.budget
        assert estimate(job.with_steps(steps + 1), where, KNOWN).seconds.high > window.budget


@pytest.mark.parametrize(
    ("checkpoint_freq", "eval_freq", "saves"),
    [(0, 0, 1), (4, 6, 4), (5, 0, 2), (3, 100, 4), (1, 1, 10)],
)
def test_saves_are_steps_that_checkpoint_or_evaluate(checkpoint_freq, eval_freq, saves):
    job = job_for(checkpoint_freq=checkpoint_freq, eval_freq=eval_freq)
    assert job.with_steps(10).count("checkpoint") == saves
    assert job.with_steps(1_000_000).count("checkpoint") >= saves  # counted, never listed


def test_scaling_is_that_of_the_published_model():
    """Nearly linear on NVLink, visibly worse over PCIe, useless over 10 Gb/s Ethernet."""

    def efficiency(gpu: str, gpus: int, **more: object) -> float:
        def step(n: int, **how: object) -> float:
            job = job_for(world=n, tokens="10B", mini_batch_size=16)
            return estimate(job, on(gpu, gpus=n, **how), KNOWN).step.value

        return step(1) / (gpus * step(gpus, **more))

    assert efficiency("H200", 8) > 0.97
    assert 0.88 < efficiency("RTX-4090", 8) < 0.97
    assert efficiency("H100", 16, nodes=2, interconnect="ib400") > 0.9
    assert efficiency("H100", 16, nodes=2, interconnect="eth10") < 0.2


def test_loss_is_the_published_law_with_its_offset_and_intervals_add_in_quadrature():
    both = total([Interval(10, 7, 14), Interval(10, 6, 13)])
    assert (both.value, both.low, both.high) == (20, 15, 25)
    assert total([Interval(1, 0, 3), Interval(1, 0, 3)]).low >= 0
    found = predicted_loss(124_475_904, 10.26e9)
    assert found.low <= 3.272 <= found.high  # llm.c's log
    assert predicted_loss(7_000_000, 1e9) is None
    assert effective_tokens(1e9, 2e9) == 1e9
    assert 1e9 < effective_tokens(4e9, 1e9) < 4e9


def test_the_size_of_the_data_says_which_profile_it_has_text_for():
    known = hardware.load().profiles.values()
    for unique, says in (
        (100_000_000, "at most 40,000,000"),  # no profile has text enough: a smaller model
        (400_000_000, "--profile fast, about 2.5 "),
    ):
        assert says in hardware.advise_profile(unique, parameters=100_000_000, known=known)


@pytest.mark.parametrize("name", ["modern-nano", "modern-small", "speedrun"])
def test_the_flops_of_muons_step_are_those_that_torch_counts(name):
    assert {how: rounds for how, (rounds, _) in NEWTON_SCHULZ.items()} == timing.MUON_ROUNDS
    with torch.device("meta"):
        model = GPT(preset(name).model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    _, muon = build_optimizers(model, OptimConfig(optimizer="muon"), device=torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        muon.step()
    assert counter.get_total_flops() == timing.muon_flops(model.config)
    amount = timing.work(model.config, micro_batch=8, accumulation=1, optimizer="muon")
    plain = timing.work(model.config, micro_batch=8, accumulation=1)
    assert amount == (*plain[:-1], counter.get_total_flops())


def test_a_cpu_takes_muons_rounds_in_fp32_and_more_time_for_logits_that_are_not_compiled():
    def rates(bf16: bool, compiled: bool) -> dict[str, float]:
        found = timing.processor(1e11, hardware.load(), bf16=bf16, compiled=compiled)
        return dict(zip(timing.KINDS, found.seconds_per_unit, strict=True))

    fp32, bf16, eager = rates(False, True), rates(True, True), rates(True, False)
    assert {kind for kind in fp32 if fp32[kind] != bf16[kind]} == {"matmul", "attention"}
    assert {kind for kind in bf16 if bf16[kind] < eager[kind]} == {"logits"}
