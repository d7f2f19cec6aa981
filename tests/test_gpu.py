"""What only a GPU can show: bf16, fused AdamW, compile, NCCL, and bit-identical resume in deterministic mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import launch
from test_benchmark import benchmark

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


def _flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--n_layer=2", "--n_head=2", "--n_embd=64", "--context_length=16", "--vocab_size=256"),
        *("--total_batch_size=128", "--mini_batch_size=4", "--val_tokens=320", "--eval_freq=5"),
        *("--device=cuda", "--checkpoint_freq=5", "--max_steps=20", "--sample_freq=0"),
        *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=run", *more),
    ]


def _train(data: Path, folder: Path, *more: str, **extra: str) -> Path:
    done = launch.train(_flags(data, folder, *more), **extra)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _assert_close(run: Path, reference: Path, tolerance: float) -> None:
    found, expected = launch.steps(run), launch.steps(reference)
    assert sorted(found) == sorted(expected) == list(range(1, 21))
    for step in found:
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=tolerance)


def test_fp32_on_the_gpu_follows_the_cpu(tiny_data: Path, tmp_path: Path) -> None:
    gpu = _train(tiny_data, tmp_path / "gpu", "--dtype=fp32", "--compile=off")
    cpu = _train(tiny_data, tmp_path / "cpu", "--dtype=fp32", "--compile=off", "--device=cpu")
    _assert_close(gpu, cpu, 1e-4)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_bf16_follows_fp32(compile: str, tiny_data: Path, tmp_path: Path) -> None:
    bf16 = _train(tiny_data, tmp_path / "bf16", "--dtype=bf16", f"--compile={compile}")
    fp32 = _train(tiny_data, tmp_path / "fp32", "--dtype=fp32", "--compile=off")
    _assert_close(bf16, fp32, 5e-3)  # bf16 has 8 bits: 2**-8 relative


def test_one_process_over_nccl_equals_none(tiny_data: Path, tmp_path: Path) -> None:
    """With torchrun's environment one process goes through DDP and NCCL; the step is the same."""
    alone = _train(tiny_data, tmp_path / "alone", "--dtype=fp32", "--compile=off")
    rendezvous = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rendezvous |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    nccl = _train(tiny_data, tmp_path / "nccl", "--dtype=fp32", "--compile=off", **rendezvous)
    _assert_close(nccl, alone, 1e-5)


def test_benchmark_of_the_training_step(tmp_path: Path) -> None:
    words = ["--model", "gpt2", "--steps", 2, "--warmup", 1, "--memory", "--profile"]
    code, _, error = benchmark("gpu", *words, "--json", tmp_path / "g.json")
    assert code == 0, error
    found = json.loads((tmp_path / "g.json").read_text())["gpt2"]
    assert found["trainers"][0]["tokens_per_second"] > 10_000
    assert found["profile"]["ours"]["seconds"]["matmul"] > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_is_bit_identical_in_deterministic_mode(
    dtype: str, tiny_data: Path, tmp_path: Path
) -> None:
    more = (f"--dtype={dtype}", "--compile=off", "--deterministic")
    straight = _train(tiny_data, tmp_path / "straight", *more)
    flags = _flags(tiny_data, tmp_path / "cut", *more)
    assert launch.train(flags, FAULT="step:kill9@11").returncode != 0
    resumed = _train(tiny_data, tmp_path / "cut", *more, "--resume=latest")
    assert [e["level"] for e in launch.events(resumed, "resume")] == ["bit-identical"]
    assert launch.losses(resumed) == launch.losses(straight)
    assert launch.parameter_hash(resumed, 20) == launch.parameter_hash(straight, 20)
