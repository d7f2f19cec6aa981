"""Predicted bytes against torch's own count: MemTracker on fake tensors, and the allocations of real steps."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import launch
from benchmarks.live_bytes import peak_of_step
from gpt2lab.config import schema
from gpt2lab.config.schema import Config, ModelConfig, OptimConfig, Optimizer, TuningConfig
from gpt2lab.config.settings import override
from gpt2lab.finetuning.packed import PackedGPT
from gpt2lab.model.counts import count_parameters
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.model.lora import add_lora
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.planner.job import Job
from gpt2lab.planner.memory import PARTS, Memory, StepMemory
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT
from gpt2lab.training.train_step import train_step
from one_process import CPU, Alone, batch_of, shape
from tiny import MODERN

PRETRAINING = TuningConfig()


def tracked_peak(
    config: ModelConfig, B: int, A: int, dtype: str, optimizer: Optimizer = "adamw"
) -> int:
    """Return MemTracker's peak over two real train_steps on fake tensors (the second has the optimizer's state)."""
    with FakeTensorMode():
        model = GPT(config)
        optimizers = build_optimizers(model, OptimConfig(optimizer=optimizer))
        tracker = MemTracker()
        tracker.track_external(model, *optimizers)
        batch = batch_of(config, B, A)
        with tracker:
            for _ in range(2):
                how: Any = {"strategy": Alone(dtype, tracker), "grad_clip": 1.0, "seed": 0}
                train_step(model, optimizers, batch, 1e-3, **how)
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


@pytest.fixture
def fake_numbers(monkeypatch) -> None:
    """Let train_step read its loss: a fake tensor has no value."""
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 1.0)


def step_memory(model: ModelConfig, *cut: Any, world_size: int = 1, **system: Any) -> StepMemory:
    B, A, dtype, optimizer, *_ = *cut, "adamw"
    tuning = system.pop("tuning", PRETRAINING)
    config = Config(model, optim=OptimConfig(optimizer=optimizer), tuning=tuning)
    config = override(config, system)
    return StepMemory(config, micro_batch=B, accumulation=A, dtype=dtype, world_size=world_size)


def predicted(config: ModelConfig, *cut: Any, **how: Any) -> Memory:
    return step_memory(config, *cut, **how).peak()


# Each is in a regime of its own: what peaks is the head, the blocks, the embedding, the weights' gradients.
SHAPES = {
    "gpt2 wide": (shape(2, 768, 12, 1024, 50304), 4, 1),
    "gpt2 wide, accumulating": (shape(2, 768, 12, 1024, 50304), 4, 3),
    "gpt2 deep": (shape(4, 768, 12, 1024, 50304), 2, 2),
    "micro": (shape(4, 128, 4, 256, 50304), 8, 2),
    "few words": (shape(3, 64, 1, 512, 2), 8, 1),
    "few words, accumulating": (shape(2, 64, 2, 256, 64), 4, 2),
    "small vocabulary": (shape(4, 256, 4, 256, 1000), 8, 1),
    "short": (shape(4, 1024, 1, 4, 64), 1, 1),
    "short, accumulating": (shape(4, 1024, 1, 4, 64), 1, 2),
    "mostly vocabulary": (shape(2, 64, 1, 8, 50304), 1, 1),
    "head against embedding": (shape(4, 512, 8, 128, 8192), 2, 3),
}


# The dtypes differ in what a block and the head keep; the rest is shared, so fp32 skips what bf16 has shown.
QUICK = [("gpt2 wide", "bf16"), ("few words", "fp32"), ("mostly vocabulary", "bf16")]
SLOW = [
    *((name, "bf16") for name in SHAPES if (name, "bf16") not in QUICK),
    *((name, "fp32") for name in ("gpt2 wide", "short", "head against embedding")),
]


@pytest.mark.usefixtures("fake_numbers")
@pytest.mark.parametrize(("name", "dtype"), [*QUICK, *launch.slow(*SLOW)])
def test_peak_is_that_of_torchs_memory_tracker_to_half_a_percent(name, dtype):
    config, B, A = SHAPES[name]
    memory = predicted(config, B, A, dtype)
    assert memory.tensors == pytest.approx(tracked_peak(config, B, A, dtype), rel=0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_numbers")
# A smaller case takes minutes.
@settings(derandomize=True, max_examples=20, deadline=None, phases=[Phase.generate])
@given(
    config=st.builds(
        lambda D, H, **rest: ModelConfig(n_embd=D * H, n_head=H, **rest),
        D=st.sampled_from([16, 32, 64]),
        H=st.sampled_from([1, 2, 6]),
        n_layer=st.integers(1, 4),
        context_length=st.integers(8, 1024),
        vocab_size=st.sampled_from([64, 1000, 8192]),
        positions=st.sampled_from(["learned", "rotary", "half_rotary"]),
        norm=st.sampled_from(["layernorm", "rmsnorm"]),
        embedding_norm=st.sampled_from(["off", "on"]),
        qk_norm=st.sampled_from(["none", "rmsnorm", "gainless"]),
        activation=st.sampled_from(["gelu", "relu2"]),
        head=st.sampled_from(["tied", "untied"]),
        logit_cap=st.sampled_from([0.0, 15.0]),
    ),
    B=st.integers(1, 8),
    A=st.integers(1, 3),
    dtype=st.sampled_from(["bf16", "fp32"]),
    optimizer=st.sampled_from(["adamw", "muon", "normuon"]),
)
def test_any_options_of_any_shape_hold_what_the_tracker_counts(config, B, A, dtype, optimizer):
    # What is left out, up to 31 kB, weighs in a smaller model.
    assume(count_parameters(config) > 250_000)
    tracked = tracked_peak(config, B, A, dtype, optimizer)
    assert predicted(config, B, A, dtype, optimizer).tensors == pytest.approx(tracked, rel=0.005)


REAL = [(shape(3, 128, 4, 128, 4096), 4, 1), (shape(2, 192, 3, 64, 8192), 3, 2)]
REAL.append((shape(3, 128, 4, 128, 1000), 4, 2))


# A processor without bf16 takes ten times as long for it: each test has one such case by default.
DTYPES = ["fp32", *launch.slow("bf16")]


@pytest.mark.parametrize(
    ("config", "B", "A", "recompute", "dtype"),
    [
        *((*case, "none", "fp32") for case in REAL),
        *((*REAL[2], how, "fp32") for how in ("block", "selective")),
        (*REAL[1], "none", "bf16"),
        *launch.slow(
            *((*case, "none", "bf16") for case in (REAL[0], REAL[2])),
            *((*REAL[2], how, "bf16") for how in ("block", "selective")),
            *((*REAL[0], "block", dtype) for dtype in ("bf16", "fp32")),
            *((*REAL[1], "selective", dtype) for dtype in ("bf16", "fp32")),
        ),
    ],
)
def test_peak_is_that_of_real_steps_to_three_percent(config, B, A, recompute, dtype):
    assert_is_that_of_real_steps(config, B, A, dtype, recompute=recompute, margin=0.03)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("optimizer", "recompute"), [("adamw", "selective"), ("muon", "none"), ("normuon", "block")]
)
def test_a_modern_models_peak_is_that_of_real_steps_to_two_percent(optimizer, recompute, dtype):
    cut = (dataclasses.replace(REAL[2][0], **MODERN), 4, 2, dtype)
    assert_is_that_of_real_steps(*cut, optimizer, recompute=recompute, margin=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize(
    ("lora_r", "options", "margin"), [(0, {}, 0.03), (8, {}, 0.05), (8, MODERN, 0.05)]
)
def test_fine_tunings_peak_is_that_of_real_steps_to_three_percent_and_adapters_to_five(
    lora_r, options, margin, recompute, dtype
):
    config, B, A = dataclasses.replace(REAL[2][0], **options), 4, 2
    tuning = TuningConfig(instructions="demo", lora_r=lora_r)
    how = {"recompute": recompute, "tuning": tuning, "margin": margin}
    assert_is_that_of_real_steps(config, B, A, dtype, **how)
    plain = step_memory(config, B, A, dtype)
    step = step_memory(config, B, A, dtype, tuning=dataclasses.replace(tuning, lora_r=0))
    T = config.context_length
    assert step.block - plain.block == B * T * T * (4 if dtype == "fp32" else 2)


def assert_is_that_of_real_steps(
    config: ModelConfig,
    *cut: Any,
    recompute: Any,
    tuning: TuningConfig = PRETRAINING,
    margin: float,
) -> None:
    B, A, dtype, optimizer, *_ = *cut, "adamw"
    model = build_model(config, seed=0, device=CPU)
    if tuning.lora_r:
        add_lora(model, tuning)
    strategy = Alone(dtype, recompute=recompute)
    rows = (lambda m: PackedGPT(m, END_OF_TEXT),) if tuning.instructions else ()
    wrapped = strategy.prepare(model, *rows)
    optimizers = build_optimizers(model, OptimConfig(optimizer=optimizer))
    found = peak_of_step(wrapped, optimizers, batch_of(config, B, A), strategy)
    how = {"tuning": tuning, "activation_checkpointing": recompute}
    memory = predicted(config, B, A, dtype, optimizer, **how)
    assert memory.tensors == pytest.approx(found, rel=margin)


@pytest.mark.slow
def test_each_of_two_processes_holds_what_is_predicted_to_five_percent():
    """All modes and all ways to recompute, measured in workers/live_bytes.py; under ddp and zero1 it is 1 %.

    fsdp's buffers, and those of Muon's all-to-all, come and go with gloo's threads, up to 8 % either way, so a case may
    take several runs to show it, most beside busy programs.
    """
    missed: list[str] = []
    for _ in range(60):
        done = launch.train_in_forks(missed, world=2, program=launch.WORKERS / "live_bytes.py")
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line[:5] == "peak "]
        assert len(lines) == (len(missed) or 23)
        missed = []
        for case in lines:
            peak, mode = case.pop("peak"), case["parallel"]
            comes_and_goes = mode == "fsdp" or (mode == "zero1" and case["optimizer"] != "adamw")
            how = {"parallel": mode, "fsdp_param_dtype": case["param_dtype"]}
            how |= {"activation_checkpointing": case["recompute"], "world_size": 2}
            cut = (case[name] for name in ("B", "A", "dtype", "optimizer"))
            memory = predicted(ModelConfig(**case["model"]), *cut, **how)
            if memory.tensors != pytest.approx(peak, rel=0.05 if comes_and_goes else 0.01):
                assert comes_and_goes, (case, peak)
                missed.append(json.dumps(case))
        if not missed:
            return
    assert not missed


examples = settings(derandomize=True, max_examples=200, deadline=None)
sizes = st.builds(
    lambda L, D, H, T, V, options: dataclasses.replace(shape(L, D * H, H, T, V), **options),
    *(st.integers(*ends) for ends in ((1, 12), (8, 128), (1, 12), (8, 2048), (64, 60_000))),
    st.sampled_from([{}, MODERN]),
)


def peak(config: ModelConfig, *cut: Any, world: int = 1) -> int:
    return predicted(config, *cut, world_size=world).tensors


@examples
@given(sizes, st.integers(1, 32), st.integers(1, 4), st.sampled_from(["bf16", "fp32"]))
def test_memory_grows_with_everything(config, B, A, dtype):
    here = peak(config, B, A, dtype)
    more = {"n_layer": config.n_layer + 1, "n_embd": config.n_embd + config.n_head}
    more |= {name: getattr(config, name) + 1 for name in ("context_length", "vocab_size")}
    for name, value in more.items():
        larger = peak(dataclasses.replace(config, **{name: value}), B, A, dtype)
        # Where the optimizer's step is the peak, a longer context adds learned positions alone.
        at_least = name == "context_length" and config.positions == "rotary"
        assert larger > here or (at_least and larger == here), name
    assert peak(config, B + 1, A, dtype) >= here
    assert peak(config, B, A + 1, dtype) >= here
    assert peak(config, B, A, dtype, world=2) >= here
    memory = predicted(config, B, A, dtype)
    assert memory.tensors == sum(getattr(memory, part) for part in PARTS)
    assert all(getattr(memory, part) >= 0 for part in PARTS)


@examples
@given(config=sizes, sequences=st.integers(1, 96), gib=st.floats(0.1, 200))
def test_the_largest_micro_batch_fits_and_the_next_divisor_does_not(config, sequences, gib):
    budget = gib * 2**30
    batch = schema.BatchConfig(total_batch_size=2 * sequences * config.context_length)
    settings = dataclasses.replace(Config(), model=config, batch=batch)
    job = Job(settings, max_steps=1, world_size=2, dtype="bf16", compiled=False)
    found = job.largest_micro_batch(budget)
    divisors = [size for size in range(1, sequences + 1) if sequences % size == 0]
    fits = {n: peak(config, n, sequences // n, "bf16", world=2) <= budget for n in divisors}
    assert found == max((size for size in divisors if fits[size]), default=None)


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
def test_the_mean_of_a_tail_is_a_number_more_for_each_weight_of_a_rank(parallel):
    model = shape(2, 64, 2, 256, 64)
    without, held = (
        step_memory(model, 4, 1, "bf16", world_size=2, parallel=parallel, average_tail=share)
        for share in (0, 0.1)
    )
    share = 4 * count_parameters(model) // (1 if parallel == "ddp" else 2)
    assert held.optimizer - without.optimizer == share
