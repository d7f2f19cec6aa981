"""What is sent between processes, by mode: its bytes, its seconds, and what of them a step shows."""

import dataclasses
import json
import re
from typing import Any, get_args

import pytest

import launch
from forecasting import KNOWN, job_for, on
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import BatchConfig, Config, ModelConfig, Parallel, SystemConfig
from gpt2lab.model.counts import count_block_parameters
from gpt2lab.planner.communication import exposed, step_bytes, wire_share
from gpt2lab.planner.estimate import estimate
from gpt2lab.planner.hardware import Link
from gpt2lab.planner.job import Job

MODES: tuple[Parallel, ...] = get_args(Parallel)
STEADY = Link("steady", "", ((1.0, 1e9),), is_nvlink=False)  # 1 GB/s whatever the message
MODEL = preset("gpt2").model
MODERN = preset("modern-small").model


def seconds(
    parallel: Parallel, *, window: float, world: int = 4, link: Link | None = STEADY, **more: Any
) -> tuple[float, float]:
    model = more.get("model", MODEL)
    batch = BatchConfig(total_batch_size=3 * world * model.context_length, mini_batch_size=1)
    system = SystemConfig(parallel=parallel, fsdp_param_dtype=more.get("param_dtype", "fp32"))
    job = Job(Config(model=model, batch=batch, system=system), 1, world, "bf16", compiled=True)
    return exposed(job, link, window)


@pytest.mark.parametrize("model", [MODEL, MODERN], ids=lambda model: model.norm)
@pytest.mark.parametrize(("mode", "dtype"), [*((mode, "fp32") for mode in MODES), ("fsdp", "bf16")])
def test_all_that_is_sent_is_timed(mode, dtype, model):
    """And nothing of it is hidden, where there is nothing to hide behind."""
    sent = step_bytes(model, parallel=mode, accumulation=3, param_dtype=dtype)
    expected = sum(size * wire_share(kind, world_size=4) for kind, size in sent.items()) / 1e9
    found = seconds(mode, window=0.0, model=model, param_dtype=dtype)
    assert found == pytest.approx((expected, expected))


@pytest.mark.parametrize("model", [MODEL, MODERN], ids=lambda model: model.norm)
def test_matrices_gathered_in_bf16_are_half_the_bytes(model):
    """The gradients of vectors are scattered once instead of with each of three micro-batches; their sum stays fp32."""
    matrices = 12 * model.n_layer * model.n_embd**2
    vectors = model.n_layer * count_block_parameters(model) - matrices
    how = {"parallel": "fsdp", "accumulation": 3}
    fp32, bf16 = (step_bytes(model, param_dtype=dtype, **how) for dtype in ("fp32", "bf16"))
    assert fp32["all_gather"] - bf16["all_gather"] == 3 * 2 * 2 * matrices + 5 * 4 * vectors
    assert fp32["reduce_scatter"] - bf16["reduce_scatter"] == 2 * 4 * vectors


@pytest.mark.parametrize("mode", MODES)
def test_work_hides_what_travels_beside_it_but_never_all(mode):
    shown = [seconds(mode, window=window)[0] for window in (0.0, 0.1, 1.0, 10.0, 1e6)]
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
    computed = step_bytes(model, parallel=mode, accumulation=2, on_gpu=False)
    for kind, size in counted.items():
        assert 0 <= size - computed.get(kind, 0) <= 2 * 4 * model.n_embd + 8, kind


def test_modes_that_send_more_take_longer_where_the_link_is_slow():
    ddp, zero1, fsdp = (seconds(mode, window=0.5)[0] for mode in MODES)
    assert ddp < zero1 < fsdp
    # zero1 sends as much, but less of it can hide: the new weights travel after the update.
    ddp, zero1, _ = (seconds(mode, window=0.0)[0] for mode in MODES)
    assert zero1 == pytest.approx(ddp)
    # One process and an unknown link send nothing that is predicted.
    for world, link in ((1, STEADY), (4, None)):
        assert seconds("fsdp", window=1.0, world=world, link=link) == (0.0, 0.0)


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
