"""What a CUDA run decides before its first kernel, with torch's answers about the GPU played: no GPU is needed."""

import dataclasses
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from gpt2lab.config.derived import check_fsdp_param_dtype
from gpt2lab.config.schema import ModelConfig, SystemConfig, TuningConfig
from gpt2lab.distributed import runtime
from gpt2lab.distributed.compilation import resolve_compile
from gpt2lab.distributed.runtime import Runtime, resolve_residual_dtype
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError
from gpt2lab.model import attention_backend
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.model.loss import cross_entropy_sum
from gpt2lab.training import device
from gpt2lab.training.resume_check import facts_of
from tiny import resolved


@pytest.fixture
def gpu(monkeypatch) -> Iterator[None]:
    """Have torch say that there is one GPU, and put its switches back afterwards."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that what a test leaves there is taken away
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *unused: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)  # a CUDA build asks the card
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    before = torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        yield
    torch.set_float32_matmul_precision(before)


def use(**system: object) -> torch.device:
    runtime = Runtime()
    runtime.use(SystemConfig(device="cuda", **system))  # type: ignore[arg-type]
    return runtime.device


def test_fp32_stays_fp32_where_a_container_says_tf32(gpu):
    torch.set_float32_matmul_precision("high")  # as where TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    assert (use(), torch.get_float32_matmul_precision()) == (torch.device("cuda", 0), "highest")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication", stacklevel=1)


def test_a_gpu_forgets_the_kernels_of_a_cpu_in_the_same_process(gpu):
    """With them its first product is an error: cuBLAS has no buffers for them."""
    Runtime().use(SystemConfig(device="cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    use()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_compiler_gets_what_the_run_needs(deterministic):
    """As attributes: the environment is read when torch's compiler is imported, which is before a run is known."""
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, context_length=4, vocab_size=16))
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    try:
        with inductor_config.patch({"deterministic": False, "cpp.use_decompose_tanh": False}):
            Strategy(Runtime(), SystemConfig(compile="on")).prepare(model)
            assert inductor_config.deterministic is deterministic
            assert inductor_config.cpp.use_decompose_tanh
    finally:
        torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize(
    ("wanted", "dtype", "device", "found"),
    [
        *(("auto", "bf16", "cuda", "bf16"), ("auto", "fp32", "cuda", "fp32")),
        *(("auto", "bf16", "cpu", "fp32"), ("bf16", "bf16", "cpu", "bf16")),
        ("fp32", "bf16", "cuda", "fp32"),
    ],
)
def test_the_residual_stream_is_bf16_on_a_gpu_or_where_asked(wanted, dtype, device, found):
    assert resolve_residual_dtype(wanted, dtype, torch.device(device)) == found


def test_a_residual_stream_and_gathering_in_bf16_beside_fp32_products_are_rejected():
    with pytest.raises(ConfigError, match="residual_dtype bf16 needs --dtype bf16"):
        resolve_residual_dtype("bf16", "fp32", torch.device("cpu"))
    system = SystemConfig(dtype="fp32", parallel="fsdp", fsdp_param_dtype="bf16")
    with pytest.raises(ConfigError, match="use --dtype bf16, or --fsdp_param_dtype fp32"):
        check_fsdp_param_dtype(system)
    for change in ({"dtype": "bf16"}, {"parallel": "ddp"}, {"fsdp_param_dtype": "fp32"}):
        check_fsdp_param_dtype(dataclasses.replace(system, **change))  # type: ignore[arg-type]


def test_deterministic_mode_sets_cublas_buffers_or_judges_the_users_own(gpu, monkeypatch):
    use(deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    use(deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:0:0 is not determ"):
        use(deterministic=True)


def test_more_processes_than_gpus_are_rejected(gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="local rank 1 has no GPU: this machine has 1"):
        use()


@pytest.mark.parametrize(
    ("triton", "capability", "reason"),
    [(None, (9, 0), "no Triton"), (object(), (6, 1), "older than Triton supports")],
)
def test_a_gpu_that_cannot_compile_still_trains(triton, capability, reason, gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda", 0)
    compiles, note = resolve_compile(SystemConfig(), device=cuda, max_steps=1)
    assert not compiles
    assert note.startswith("not compiling: ")
    assert reason in note
    with pytest.raises(ConfigError, match=f"compile on: .*{reason}.*--compile off"):
        resolve_compile(SystemConfig(compile="on"), device=cuda, max_steps=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_compile(SystemConfig(), device=cuda, max_steps=1) == (True, None)


def test_attention_is_looked_at_with_the_runs_own_batch_and_mask(gpu, tiny_flags, monkeypatch):
    asked: list[tuple[Any, ...]] = []

    def choose(wanted: str, model: object, **how: Any) -> str:
        asked.append((wanted, how["micro_batch"], how["masked"], how["autocast"]()._enabled))
        return "efficient"

    monkeypatch.setattr(attention_backend, "choose", choose)
    start = resolved(tiny_flags)
    model = build_model(start.config.model, seed=1, device=torch.device("cpu"))
    runtime = Runtime()
    assert device.check_kernels(start, model, runtime) is start  # on a CPU
    assert "attention" not in facts_of(start, runtime)["environment"]
    runtime.use(SystemConfig(device="cuda"))
    found = device.check_kernels(start, model, runtime)
    assert facts_of(found, runtime)["environment"]["attention"] == "efficient"
    system = dataclasses.replace(start.config.system, attention="flash", dtype="bf16")
    tuning = TuningConfig(instructions="demo")
    config = dataclasses.replace(start.config, system=system, tuning=tuning)
    device.check_kernels(dataclasses.replace(start, config=config), model, runtime)
    assert asked == [("auto", 2, False, False), ("flash", 2, True, True)]


@pytest.mark.parametrize(
    ("warning", "kernel"), [(None, "triton"), ("off by 1 on this GPU", "inductor")]
)
def test_a_compiled_run_records_its_loss_kernel(gpu, tiny_flags, monkeypatch, warning, kernel):
    """Their bits differ, so a resume with the other one promises none."""

    def choose(model: GPT, dtype: str) -> str | None:
        model.loss_kernel = None if warning else cross_entropy_sum
        return warning

    chosen = SimpleNamespace(choose=choose)  # the real one needs Triton
    monkeypatch.setitem(sys.modules, "gpt2lab.model.loss_kernel", chosen)
    monkeypatch.setattr("gpt2lab.model.loss_kernel", chosen, raising=False)
    monkeypatch.setattr(attention_backend, "choose", lambda *args, **how: "efficient")
    start = resolved([*tiny_flags, "--compile=on"])
    model = build_model(start.config.model, seed=1, device=torch.device("cpu"))
    runtime = Runtime()
    runtime.use(SystemConfig(device="cuda"))
    found = device.check_kernels(start, model, runtime)
    assert facts_of(found, runtime)["environment"]["loss_kernel"] == kernel
    assert found.warnings[len(start.warnings) :] == ((warning,) if warning else ())


@pytest.mark.parametrize(("typed", "meant"), [(None, "0"), ("1", "0"), ("3", "3"), ("2", "2")])
def test_torchs_watchdog_aborts_no_survivor_unless_told_to(monkeypatch, typed, meant):
    """Who has set nothing has 1 from torchrun."""
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", typed or "1")
    if typed is None:
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    runtime._keep_survivors_alive()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == meant
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
