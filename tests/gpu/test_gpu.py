"""What only a GPU can show. `pytest -m gpu` on a machine with one; those that need two GPUs are skipped on one."""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import launch
from gpt2lab.checkpoint import store
from gpt2lab.config.schema import Config, ModelConfig, OptimConfig, Optimizer, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.data.shards import open_data
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.evaluation.generation import draw
from gpt2lab.evaluation.validation import open_validation
from gpt2lab.model import attention_backend
from gpt2lab.model.attention_backend import choose
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.planner.memory import StepMemory
from gpt2lab.training.train_step import is_finite, train_step
from launch import script
from tiny import write_items, write_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.filterwarnings("default"),  # a new card's first run shall not end at its advice
]
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=128, context_length=256, vocab_size=512)


def _flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--n_layer=2", "--n_head=2", "--n_embd=64", "--context_length=16", "--vocab_size=256"),
        *("--total_batch_size=128", "--mini_batch_size=4", "--val_tokens=320", "--eval_freq=5"),
        *("--device=cuda", "--checkpoint_freq=5", "--max_steps=20", "--sample_freq=0"),
        *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=run", *more),
    ]


def test_memory_that_cannot_be_pinned_leaves_no_error_behind():
    buffer = store.StagingBuffer(2**20, pin=True)
    assert buffer._is_pinned
    assert not store._cuda("cudaHostRegister", buffer.address, 2**20, 0)  # it is already
    assert torch.ones(3, device="cuda").sum().item() == 3
    buffer.close()


def _train(data: Path, folder: Path, *more: str, **extra: str) -> Path:
    launch.worked(launch.train(_flags(data, folder, *more), **extra))
    return folder / "run"


def _assert_close(run: Path, reference: Path, tolerance: float) -> None:
    found, expected = launch.current_steps(run), launch.current_steps(reference)
    assert sorted(found) == sorted(expected) == list(range(1, 21))
    for step in found:
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=tolerance)


def _environment(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())["environment"]
    return found


@pytest.fixture(scope="module")
def fp32(tiny_data, tmp_path_factory) -> Path:
    """Return the plain run that others are compared with."""
    return _train(tiny_data, tmp_path_factory.mktemp("fp32"), "--dtype=fp32", "--compile=off")


# -- the same curve ------------------------------------------------------------------------------------------------


def test_fp32_on_the_gpu_follows_the_cpu(fp32, tiny_data, tmp_path):
    cpu = _train(tiny_data, tmp_path, "--dtype=fp32", "--compile=off", "--device=cpu")
    _assert_close(fp32, cpu, 1e-4)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_bf16_follows_fp32(compile, fp32, tiny_data, tmp_path):
    bf16 = _train(tiny_data, tmp_path, "--dtype=bf16", f"--compile={compile}")
    _assert_close(bf16, fp32, 5e-3)  # bf16 has 8 bits: 2**-8 relative


def test_muon_follows_the_cpu(tiny_data, tmp_path):
    """Its products are in bf16 on a GPU, in fp32 on a CPU."""
    more = ("--optimizer=muon", "--dtype=fp32", "--compile=off")
    gpu = _train(tiny_data, tmp_path / "gpu", *more)
    cpu = _train(tiny_data, tmp_path / "cpu", *more, "--device=cpu")
    _assert_close(gpu, cpu, 1e-2)


@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_recomputing_follows_fp32(recompute, fp32, tiny_data, tmp_path):
    more = ("--dtype=fp32", "--compile=off", f"--activation_checkpointing={recompute}")
    _assert_close(_train(tiny_data, tmp_path, *more), fp32, 1e-5)


@pytest.mark.parametrize("vocab_size", [256, 50304])
def test_the_loss_kernel_is_right(vocab_size):
    config = dataclasses.replace(MODEL, vocab_size=vocab_size)
    model = build_model(config, seed=0, device=torch.device("cuda"))
    from gpt2lab.model import loss_kernel  # needs Triton

    assert loss_kernel.choose(model, "bf16") is None
    assert model.loss_kernel is not None


def test_one_process_over_nccl_equals_none(fp32, tiny_data, tmp_path):
    """With torchrun's environment one process goes through DDP and NCCL; the step is the same."""
    more = ("--dtype=fp32", "--compile=off")
    nccl = _train(tiny_data, tmp_path, *more, **ALONE, MASTER_PORT="29517")
    _assert_close(nccl, fp32, 1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_modes_of_sharing_agree_on_gpus(world, tmp_path):
    """ddp, zero1, fsdp and its offload over NCCL: losses, norms, rejections and files; see workers/modes.py."""
    if world > torch.cuda.device_count():
        pytest.skip(f"{world} GPUs")
    words = [str(tmp_path), "cuda"]
    extra = {**ALONE, "MASTER_PORT": "29518"} if world == 1 else {}
    done = launch.train(words, world=world, program=launch.WORKERS / "modes.py", **extra)
    assert done.returncode == 0, done.stderr
    for mode in ("zero1", "zero1 scattered", "fsdp", "fsdp offloaded"):
        for optimizer in ("adamw", "muon", "normuon"):
            assert done.stdout.count(f"{mode} agrees with {optimizer}") == world


@pytest.mark.parametrize("more", [("--parallel=fsdp",), ("--parallel=fsdp", "--fsdp_offload")])
def test_two_gpus_train_as_one(more, fp32, tiny_data, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("2 GPUs")
    flags = _flags(tiny_data, tmp_path, "--dtype=fp32", "--compile=off", *more)
    for more in ("--stop_after_steps=10", "--resume=latest"):
        launch.worked(launch.train([*flags, more], world=2))
    _assert_close(tmp_path / "run", fp32, 1e-5)


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "compile"), [("fp32", "off"), ("bf16", "off"), ("bf16", "on"), ("fp16", "on")]
)
def test_resume_is_bit_identical_in_deterministic_mode(dtype, compile, tiny_data, tmp_path):
    more = (f"--dtype={dtype}", f"--compile={compile}", "--deterministic")
    straight = _train(tiny_data, tmp_path / "straight", *more)
    flags = _flags(tiny_data, tmp_path / "cut", *more)
    assert launch.train(flags, FAULT="step:kill9@11").returncode != 0
    resumed = _train(tiny_data, tmp_path / "cut", *more, "--resume=latest")
    assert [e["level"] for e in launch.events(resumed, "resume")] == ["bit-identical"]
    assert launch.losses(resumed) == launch.losses(straight)
    assert launch.parameter_hash(resumed, 20) == launch.parameter_hash(straight, 20)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "bad"),
    [("adamw", "bf16", "nan"), ("normuon", "bf16", "nan"), ("normuon", "fp16", "1e30")],
)
def test_pipelined_steps_are_those_one_by_one_in_deterministic_mode(
    optimizer, dtype, bad, tiny_data, tmp_path
):
    """Also around an update that is not finite, which the GPU rejects by itself; 1e30 times exceeds fp16's range."""
    runs = []
    for order in ("0", "1"):
        more = ("--deterministic", "--compile=off", f"--optimizer={optimizer}")
        flags = _flags(tiny_data, tmp_path / order, *more, f"--dtype={dtype}")
        program = launch.WORKERS / "pipelined.py"
        env = {"PIPELINED": order, "BAD_RANK": "0", "BAD_FACTOR": bad}
        launch.worked(launch.train(flags, program=program, **env))
        runs.append(tmp_path / order / "run")
    skipped = [[n for n, e in launch.steps(run).items() if not e["updated"]] for run in runs]
    assert skipped == [[7], [7]]
    losses = [[e["loss"] for e in launch.steps(run).values()] for run in runs]
    assert losses[0] == losses[1]
    assert launch.parameter_hash(runs[0], 20) == launch.parameter_hash(runs[1], 20)


def test_a_run_goes_from_gpu_to_cpu_and_back(fp32, tiny_data, tmp_path):
    more = ("--dtype=fp32", "--compile=off")
    _train(tiny_data, tmp_path, *more, "--stop_after_steps=5")
    _train(tiny_data, tmp_path, *more, "--resume=latest", "--device=cpu", "--stop_after_steps=10")
    run = _train(tiny_data, tmp_path, *more, "--resume=latest")
    assert [e["level"] for e in launch.events(run, "resume")] == ["same data", "same data"]
    _assert_close(run, fp32, 1e-4)


def test_all_that_a_run_does_has_a_deterministic_kernel(tiny_data, tmp_path):
    """Operators that have none are rejected by torch: of evaluation, sampling and HellaSwag too."""
    items = write_items(tmp_path / "items.jsonl", 8)
    more = (
        *("--deterministic", "--vocab_size=50304", "--max_steps=2", "--sample_freq=1"),
        *(f"--hellaswag_path={items}", "--hellaswag_freq=1", "--compile=off", "--dropout=0.1"),
    )
    run = _train(tiny_data, tmp_path, *more)
    for kind in ("eval", "sample", "hellaswag"):
        assert launch.events(run, kind), kind


# -- attention ---------------------------------------------------------------------------------------------------------


def test_the_kernel_on_a_hopper_is_cudnns(tiny_data, tmp_path):
    """If not, a library path or an environment variable costs a tenth of the speed."""
    if torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        pytest.skip("a Hopper or Blackwell card")
    run = _train(tiny_data, tmp_path, "--dtype=bf16", "--compile=off", "--max_steps=1")
    assert _environment(run)["attention"] == "cudnn"


@pytest.mark.parametrize("wanted", ["cudnn", "flash", "efficient", "math"])
def test_a_named_kernel_runs_and_gives_the_same_curve(wanted, fp32, tiny_data, tmp_path):
    run = _train(tiny_data, tmp_path, "--dtype=bf16", "--compile=off", f"--attention={wanted}")
    assert _environment(run)["attention"] == wanted
    assert f"attention {wanted}" in (run / "log.txt").read_text()
    _assert_close(run, fp32, 5e-3)


@pytest.mark.parametrize(
    "more", [("--attention=flash", "--dtype=fp32"), ("--attention=cudnn", "--deterministic")]
)
def test_a_kernel_that_cannot_is_rejected(more, tiny_data, tmp_path):
    done = launch.train(_flags(tiny_data, tmp_path, *more))
    assert done.returncode == 2
    assert "cannot do B 4, H 2, T 16, D 32" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.fixture
def alone(monkeypatch) -> Iterator[Runtime]:
    """Return a process without peers on the GPU, and take back what it set for good."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with (
        contextlib.ExitStack() as stack,
        torch.compiler.config.patch(cache_key_tag=""),
        warnings.catch_warnings(),
    ):
        monkeypatch.setattr(attention_backend, "_for_good", stack)
        runtime = Runtime()
        runtime.use(SystemConfig(device="cuda"))
        yield runtime
    torch._dynamo.reset()


def _batch(device: torch.device, *, pieces: int = 4) -> GlobalBatch:
    ids = torch.randint(0, 512, (pieces, 4, 257), device=device)
    micro = tuple(
        MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), i, i == pieces - 1)
        for i, part in enumerate(ids)
    )
    return GlobalBatch(micro, pieces * 4 * 256, 0, 0, pieces * 4, None, 0.0)


# A part of the names of the kernels that each one starts.
KERNELS = {"cudnn": "cudnn_generated", "flash": "flash_fwd", "efficient": "fmha"}


@pytest.mark.parametrize("wanted", ["flash", "efficient", "cudnn"])
def test_the_compiled_step_starts_the_chosen_kernel(wanted, alone):
    """All three compile the same graph: none may find in the cache what another one left there."""
    strategy = Strategy(alone, SystemConfig(compile="on", dtype="bf16"))
    model = build_model(MODEL, seed=1, device=alone.device)
    choose(wanted, model, micro_batch=4, masked=False, autocast=strategy.autocast)
    wrapped = strategy.prepare(model)
    optimizers = build_optimizers(model, OptimConfig())
    how: Any = {"strategy": strategy, "grad_clip": 1.0, "seed": 1}
    train_step(wrapped, optimizers, _batch(alone.device), 1e-3, **how)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        train_step(wrapped, optimizers, _batch(alone.device), 1e-3, **how)
    names = " ".join(event.key for event in seen.key_averages())
    found = {name for name, part in KERNELS.items() if part in names}
    assert found == {wanted}, names


def test_a_growing_text_starts_no_kernel_of_cudnn(alone):
    """It would build a plan for each length."""
    strategy = Strategy(alone, SystemConfig(dtype="bf16"))
    model = build_model(MODEL, seed=1, device=alone.device).eval()
    with strategy.autocast(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        drawn = draw(
            model, [1, 2], max_new_tokens=8, generators=[torch.Generator()], end_of_text=511
        )
        assert len(list(drawn)) > 1
    assert not [e.key for e in seen.key_averages() if KERNELS["cudnn"] in e.key]


# -- speed, memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
@pytest.mark.parametrize("waits", [0, 1])
def test_a_step_waits_for_the_gpu_only_where_the_host_decides(optimizer, waits, alone, monkeypatch):
    """For the loss and the norm together, before the update: not for batches, not for the optimizer."""
    waited, plain = [], torch.cuda.Event.synchronize
    monkeypatch.setattr(
        torch.cuda.Event, "synchronize", lambda self: (waited.append(number), plain(self))[1]
    )
    strategy = Strategy(alone, SystemConfig(dtype="bf16"))
    model = strategy.prepare(build_model(MODEL, seed=1, device=alone.device))
    optimizers = build_optimizers(model, OptimConfig(optimizer=optimizer))
    for number in range(3):
        batch = _batch(alone.device)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if number else "default")  # not the first step
            try:
                how: Any = {"strategy": strategy, "grad_clip": 1.0, "seed": number}
                how["accept"] = is_finite if waits else None
                train_step(model, optimizers, batch, 1e-3, **how)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert not [str(w.message) for w in caught if "synchronizing CUDA" in str(w.message)]
        assert waited.count(number) == waits


def test_adamw_is_fused_and_counts_its_steps_on_the_gpu(alone):
    weights = []
    for device in (alone.device, torch.device("cpu")):
        model = build_model(MODEL, seed=1, device=device)
        [optimizer] = build_optimizers(model, OptimConfig())
        for number in range(5):
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * number + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        assert all(group["fused"] for group in optimizer.param_groups)
        assert {state["step"].device.type for state in optimizer.state.values()} == {device.type}
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_validation_needs_less_memory_than_a_compiled_step(alone, tmp_path):
    config, B, T = ModelConfig(n_layer=2, n_head=2, n_embd=128), 16, 1024
    data = open_data(write_shards(tmp_path, train=(2000,), val=(60_000,)), vocab_size=50304)
    strategy = Strategy(alone, SystemConfig(compile="on", dtype="bf16"))
    model = build_model(config, seed=1, device=alone.device)
    wrapped = strategy.prepare(model)
    optimizers = build_optimizers(model, OptimConfig())
    validation = open_validation(data, config, val_tokens=40 * T, batch_size=B, strategy=strategy)
    ids = torch.randint(0, 50257, (B, T), device=alone.device)
    batch = GlobalBatch((MicroBatch(ids, ids, 0, True),), B * T, 0, 0, B, None, 0.0)
    how: Any = {"strategy": strategy, "grad_clip": 1.0, "seed": 1}
    peaks = []
    for call in (
        lambda: train_step(wrapped, optimizers, batch, 1e-3, **how),
        lambda: validation.measure(model),
    ):
        call()  # compiles
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0], peaks


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_is_what_the_planner_says(dtype, tmp_path):
    """Of GPT-2 124M uncompiled: within 5 %, besides cuBLAS's and cuDNN's own buffers."""
    data = write_shards(tmp_path / "data", train=(60_000,), val=(3_000,))
    more = (
        *("--n_layer=12", "--n_head=12", "--n_embd=768", "--context_length=1024"),
        *("--vocab_size=50304", "--mini_batch_size=8", "--total_batch_size=16384"),
        *("--max_steps=3", "--val_tokens=1024", "--compile=off", f"--dtype={dtype}"),
    )
    run = _train(data, tmp_path, *more)
    found = max(event["peak_memory_bytes"] for event in launch.events(run, "step"))
    step = StepMemory(Config(), micro_batch=8, accumulation=2, dtype=dtype)
    expected = step.peak().tensors
    assert 0.95 * expected < found < 1.05 * expected + 128 * 2**20


def test_a_second_start_compiles_nothing_anew(tiny_data, tmp_path):
    extra = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    more = ("--compile=on", "--max_steps=2")
    for name in ("one", "two"):
        _train(tiny_data, tmp_path / name, *more, **extra)
    [one], [two] = (launch.events(tmp_path / name / "run", "compile") for name in ("one", "two"))
    assert one["from_cache"] == 0 < one["graphs"]
    assert two["from_cache"] == two["graphs"] == one["graphs"]


def test_benchmark_of_the_training_step(tmp_path):
    words = ["--model", "tiny256", "--steps", 3, "--warmup", 2, "--memory", "--profile"]
    words += ["--variant", "flash", "eager", "--total_seconds", 280, "--json", tmp_path / "g.json"]
    code, said, error = script("benchmark", "gpu", *words)
    assert code == 0, said + error
    found = json.loads((tmp_path / "g.json").read_text())["tiny256"]
    rows = {row["name"]: row for row in found["trainers"]}
    assert (set(rows), rows["flash"]["attention"]) == ({"ours", "flash", "eager"}, "flash")
    assert all(row["forecast"]["actual_peak_bytes"] > 0 for row in rows.values())
    assert rows["ours"]["tokens_per_second"] > 10_000
    assert rows["ours"]["peak_live_bytes"] > 2**20
    seconds = found["profile"]["ours"]["seconds"]
    assert seconds["matmul"] > 0
    assert seconds["attention"] > 0
    measured = sum(found["profile"]["ours"]["operators"].values())
    assert measured < 1.05 * sum(seconds.values()), "kernels were counted twice"
