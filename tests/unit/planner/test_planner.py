"""What must be true of any forecast: windows, scaling, loss, what is sent; and the table of GPUs it rests on."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import launch
from forecasting import KNOWN, job_for, on, predict
from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import (
    BatchConfig,
    Config,
    ModelConfig,
    OptimConfig,
    Parallel,
    SystemConfig,
)
from gpt2lab.config.settings import override
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import checkpoint_bytes, count_block_parameters
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.muon import NEWTON_SCHULZ
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.planner import estimate as estimating
from gpt2lab.planner import hardware, timing
from gpt2lab.planner.auto import TrainingPlanner
from gpt2lab.planner.communication import exposed, step_bytes, wire_share
from gpt2lab.planner.estimate import effective_tokens, estimate, predicted_loss, verdict
from gpt2lab.planner.hardware import Link
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
    # Of the first no profile has text enough: a smaller model.
    for unique, says in ((10**8, "at most 40,000,000"), (4 * 10**8, "--profile fast, about 2.5 ")):
        assert says in hardware.advise_profile(unique, parameters=10**8, known=known)


@pytest.mark.parametrize("name", ["modern-nano", "modern-small", "speedrun"])
def test_the_flops_of_muons_step_are_those_that_torch_counts(name):
    assert {how: rounds for how, (rounds, _) in NEWTON_SCHULZ.items()} == timing.MUON_ROUNDS
    with torch.device("meta"):
        model = GPT(preset(name).model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    _, muon = build_optimizers(model, OptimConfig(optimizer="muon"))
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


# What is sent between processes, by mode: its bytes, its seconds, and what of them a step shows.
MODES: tuple[Parallel, ...] = get_args(Parallel)
STEADY = Link("steady", "", ((1.0, 1e9),), is_nvlink=False)  # 1 GB/s whatever the message
MODEL = preset("gpt2").model
MODERN = preset("modern-small").model


def shared(
    parallel: Parallel,
    *,
    world: int = 4,
    model: ModelConfig = MODEL,
    dtype: Any = "fp32",
    micro_batches: int = 3,
) -> Job:
    """Return a job of so many micro-batches a step on each rank."""
    tokens = micro_batches * world * model.context_length
    batch = BatchConfig(total_batch_size=tokens, mini_batch_size=1)
    system = SystemConfig(parallel=parallel, fsdp_param_dtype=dtype)
    return Job(Config(model=model, batch=batch, system=system), 1, world, "bf16", compiled=True)


def sharing_seconds(
    parallel: Parallel, *, window: float, world: int = 4, link: Link | None = STEADY, **more: Any
) -> tuple[float, float]:
    return exposed(shared(parallel, world=world, **more), link, window)


@pytest.mark.parametrize("model", [MODEL, MODERN], ids=lambda model: model.norm)
@pytest.mark.parametrize(("mode", "dtype"), [*((mode, "fp32") for mode in MODES), ("fsdp", "bf16")])
def test_all_that_is_sent_is_timed(mode, dtype, model):
    """And nothing of it is hidden, where there is nothing to hide behind."""
    sent = step_bytes(shared(mode, model=model, dtype=dtype))
    expected = sum(size * wire_share(kind, world_size=4) for kind, size in sent.items()) / 1e9
    found = sharing_seconds(mode, window=0.0, model=model, dtype=dtype)
    assert found == pytest.approx((expected, expected))


@pytest.mark.parametrize("model", [MODEL, MODERN], ids=lambda model: model.norm)
def test_matrices_gathered_in_bf16_are_half_the_bytes(model):
    """The gradients of vectors are scattered once instead of with each of three micro-batches; their sum stays fp32."""
    matrices = 12 * model.n_layer * model.n_embd**2
    vectors = model.n_layer * count_block_parameters(model) - matrices
    jobs = (shared("fsdp", model=model, dtype=dtype) for dtype in ("fp32", "bf16"))
    fp32, bf16 = map(step_bytes, jobs)
    assert fp32["all_gather"] - bf16["all_gather"] == 3 * 2 * 2 * matrices + 5 * 4 * vectors
    assert fp32["reduce_scatter"] - bf16["reduce_scatter"] == 2 * 4 * vectors


@pytest.mark.parametrize("mode", MODES)
def test_work_hides_what_travels_beside_it_but_never_all(mode):
    shown = [sharing_seconds(mode, window=window)[0] for window in (0.0, 0.1, 1.0, 10.0, 1e6)]
    assert shown == sorted(shown, reverse=True)
    embedding = 4 * MODEL.vocab_size * MODEL.n_embd / 1e9  # of three micro-batches under fsdp
    assert shown[-1] > (3 * 0.75 if mode == "fsdp" else 1.5) * embedding


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_are_those_of_real_steps(mode, tiny_run):
    """Up to the row that an embedding of 257 rows lacks, at most twice, and the loss and the norm."""
    program, shape = launch.WORKERS / "count_traffic.py", {"vocab_size": 257, "max_steps": 2}
    said = tiny_run().train(world=2, program=program, parallel=mode, **shape)
    counted = json.loads(re.findall("^counted (.*)$", said, re.M)[0])["bytes"]
    model = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=257)
    job = shared(mode, world=2, model=model, micro_batches=2)
    computed = step_bytes(job, on_gpu=False)
    for kind, size in counted.items():
        assert 0 <= size - computed.get(kind, 0) <= 2 * 4 * model.n_embd + 8, kind


def test_modes_that_send_more_take_longer_where_the_link_is_slow():
    ddp, zero1, fsdp = (sharing_seconds(mode, window=0.5)[0] for mode in MODES)
    assert ddp < zero1 < fsdp
    # zero1 sends as much, but less of it can hide: the new weights travel after the update.
    ddp, zero1, _ = (sharing_seconds(mode, window=0.0)[0] for mode in MODES)
    assert zero1 == pytest.approx(ddp)
    # One process and an unknown link send nothing that is predicted.
    for world, link in ((1, STEADY), (4, None)):
        assert sharing_seconds("fsdp", window=1.0, world=world, link=link) == (0.0, 0.0)


def test_the_step_of_each_mode_has_its_own_communication_and_its_share_of_the_update():
    """Over PCIe fsdp is visibly slower; what was learned from runs holds the waiting already."""
    step = {}
    for mode in MODES:
        job = job_for(world=8, tokens="1B", mini_batch_size=4, parallel=mode)
        found = estimate(job, on("RTX-4090", gpus=8), KNOWN)
        step[mode] = found.step.value
        assert found.communication_seconds > 0
        parts = 1 if mode == "ddp" else 8
        assert job.work[4] == pytest.approx(job.parameters / parts)
        machine = on("RTX-4090", gpus=8)
        learned = dataclasses.replace(machine.rates, observations=1)
        known = estimate(job, dataclasses.replace(machine, rates=learned), KNOWN)
        assert known.communication_seconds == 0
        assert known.step.value == pytest.approx(machine.rates.seconds(job.work))
    assert step["fsdp"] > 1.1 * step["ddp"]


# The table of GPUs: names, sources, a user's own file over it.
def test_a_user_without_a_home_is_one_without_additions(monkeypatch):
    """As in a container that is started with a number for a user."""
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    assert not hardware.user_file().exists()
    assert hardware.load.__wrapped__().gpus == hardware.load(hardware.SHIPPED).gpus


CARDS = {
    **{"H100": "NVIDIA H100 80GB HBM3", "H100-PCIe": "NVIDIA H100 PCIe"},
    **{"A100-40GB": "NVIDIA A100-SXM4-40GB", "A100": "NVIDIA A100-SXM4-80GB"},
    **{"A100-PCIe": "NVIDIA A100 80GB PCIe", "A100-PCIe-40GB": "NVIDIA A100-PCIE-40GB"},
    **{"RTX-4090": "NVIDIA GeForce RTX 4090", "RTX-5090": "NVIDIA GeForce RTX 5090"},
    **{"T4": "Tesla T4", "V100": "Tesla V100-SXM2-16GB", "V100-32GB": "Tesla V100-SXM2-32GB"},
    **{"V100-PCIe": "Tesla V100-PCIE-32GB", "A6000": "NVIDIA RTX A6000"},
    **{"H100-NVL": "NVIDIA H100 NVL", "RTX-6000-Ada": "NVIDIA RTX 6000 Ada Generation"},
    **{n: f"NVIDIA {n}" for n in ("H200", "L4", "A10", "A10G", "A40", "L40", "L40S", "B200")},
}
NO_CARDS = (
    *("NVIDIA A16", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti"),
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GB200"),
)


@pytest.mark.parametrize(
    ("device", "name"), [*((d, n) for n, d in CARDS.items()), *((d, None) for d in NO_CARDS)]
)
def test_a_device_name_means_its_card_or_none(device, name):
    found = KNOWN.recognise(device)
    assert (found.name if found else None) == name


def test_a_users_file_merges_over_the_shipped_one(tmp_path, monkeypatch):
    own, card = tmp_path / "own.json", {"words": [["x9"]], "bf16_tflops": [100, "me"]}
    night = {"about": "", "context_length": 256, "memory_target": 0.5, "tokens_per_parameter": 5}
    mine = {
        "sources": {"me": {"title": "my bill", "date": "2026-11-01"}},
        "gpus": {
            "H100": {"usd_per_hour": [1.5, "me"]},
            "X9": {**card, "bandwidth_gbs": [900, "me"]},
        },
        "profiles": {"night": {**night, "eval_interval": 4}},
    }
    own.write_text(json.dumps(mine))
    merged = hardware.load(own)
    assert (merged.gpu("h100").usd_per_hour, merged.gpu("h100").price_date) == (1.5, "2026-11-01")
    assert (merged.gpu("h100").peak_flops, merged.gpu("x9").peak_flops) == (989e12, 100e12)
    assert hardware.find_profile("night", merged).context_length == 256
    for wrong in (
        {"gpus": {"X9": {**card, "bf16_tflops": [100, "nobody"]}}},
        {"profiles": {"balanced": {"memory_target": "high"}}},
        {"constants": {"launch_seconds": [float("nan"), "measured"]}},
        mine | {"sources": {"me": {"title": "my bill", "date": "June"}}},
        *({"gpuz": {}}, {"gpus": {"H100": {"memory_gibz": [80, "mamf"]}}}),
        {"constants": {"start_secondz": [1, "own-guess"]}},
    ):
        own.write_text(json.dumps(wrong))
        hardware.load.cache_clear()
        hint = "did you mean" if 'z"' in own.read_text() else ""
        with pytest.raises(ConfigError, match=rf"own\.json: not readable as hardware .*{hint}"):
            hardware.load(own)
    monkeypatch.setattr(hardware, "user_file", lambda: own)
    assert TrainingPlanner().peak_flops("H100") is None  # a run trains without its MFU


def test_every_number_has_a_source_and_every_source_an_address():
    """But for listings of nvidia-smi whose pages nobody noted: the file says so."""
    table = json.loads(hardware.SHIPPED.read_text())
    numbers = [pair for gpu in table["gpus"].values() for pair in gpu.values()]
    numbers += table["constants"].values()
    used = {pair[1] for pair in numbers if isinstance(pair, list) and not isinstance(pair[0], list)}
    used |= {link["source"] for link in table["links"].values()}
    assert len(numbers) > 100
    # Every card with a rate has a memory, else no forecast could say whether a batch fits.
    rated = [gpu for gpu in KNOWN.gpus.values() if gpu.peak_flops]
    assert len(rated) >= 25
    assert [gpu.name for gpu in rated if not (gpu.memory_bytes and gpu.bandwidth)] == []
    assert used == set(table["sources"])
    assert all(source["date"] for source in table["sources"].values())
    addresses = {name: source.get("url") for name, source in table["sources"].items()}
    collected = {name for name, address in addresses.items() if address is None}
    assert collected == {"smi-listings"}
    assert "No address" in table["sources"]["smi-listings"]["title"]
    more = [a for s in table["sources"].values() for a in s.get("also", "").split()]
    for address in [*filter(None, addresses.values()), *more]:
        assert address.startswith("https://") or (launch.REPOSITORY / address).is_file(), address
