"""An evaluation holds few logits at a time, whatever its batch, and each loss keeps its bits."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.live_bytes import peak_of_call, peak_of_step
from gpt2lab.config.schema import ModelConfig, OptimConfig, SystemConfig
from gpt2lab.data.shards import open_data
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.evaluation.hellaswag import HellaSwag
from gpt2lab.evaluation.hellaswag_items import load_questions
from gpt2lab.evaluation.validation import MeasuresLoss, open_validation
from gpt2lab.model import gpt
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.tokenizers.gpt2 import GPT2
from one_process import Alone, batch_of
from tiny import write_items, write_shards

CPU = torch.device("cpu")
CONFIG = ModelConfig(n_layer=1, n_head=2, n_embd=16, context_length=64)  # 50304 ids
B, T = 8, CONFIG.context_length


@pytest.fixture
def model() -> GPT:
    return build_model(CONFIG, seed=1, device=CPU)


def open_windows(folder: Path) -> MeasuresLoss:
    """Return two batches of windows, the last one not full."""
    data = open_data(folder, vocab_size=50304)
    return open_validation(data, CONFIG, val_tokens=13 * T, batch_size=B, strategy=Alone("fp32"))


@pytest.fixture
def validation(tmp_path) -> MeasuresLoss:
    return open_windows(write_shards(tmp_path / "data", train=(99,), val=(900,)))


@pytest.fixture
def hellaswag(tmp_path) -> HellaSwag:
    questions = load_questions(write_items(tmp_path / "items.jsonl", 40), GPT2)
    return HellaSwag(questions, context_length=T, strategy=Alone("fp32"))


@pytest.mark.parametrize("name", ["validation", "hellaswag"])
def test_logits_are_held_for_some_rows_at_a_time(name, model, request, monkeypatch):
    evaluation = request.getfixturevalue(name)
    found = {}
    for limit in (2**28, 2**23):
        monkeypatch.setattr(gpt, "LOGITS_BYTES", limit, raising=False)
        found[limit] = peak_of_call(lambda: evaluation.measure(model))
    assert found[2**23] < 3 * 2**23 < 10 * 2**23 < found[2**28]


def test_a_validation_needs_less_than_a_step_of_its_batch(model, validation, monkeypatch):
    monkeypatch.setattr(gpt, "LOGITS_BYTES", 2**25, raising=False)
    optimizers = build_optimizers(model, OptimConfig())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    peak = peak_of_step(model, optimizers, batch_of(CONFIG, B, 1), Alone("fp32"))
    step = peak - 4 * weights  # gradients, two moments
    assert peak_of_call(lambda: validation.measure(model)) < step / 3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_loss_keeps_its_bits(dtype, model, monkeypatch):
    """Whether its row of logits was computed among 512 or among 7."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, CONFIG.n_embd, generator=generator)
    targets = torch.randint(0, 50257, (B, T), generator=generator)
    targets[3, ::2] = -1
    found = []
    for rows in (B * T, 100, 7):
        monkeypatch.setattr(gpt, "LOGITS_BYTES", 4 * 50304 * rows)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")
        with torch.inference_mode(), autocast:
            found.append(model.losses_of(hidden, targets).numpy())
    assert (found[0].shape, (found[0] == 0).sum()) == ((B, T), T // 2)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_a_compiled_validation_compiles_once_and_is_the_same(model, tmp_path, monkeypatch):
    """Up to rounding: compiled attention on a CPU is two matrix products."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    data = write_shards(tmp_path / "data", train=(99,), val=(900,))
    torch._dynamo.reset()
    found = {}
    for compiles in (False, True):
        monkeypatch.setattr(Strategy, "compiles_evaluation", compiles)
        validation = open_windows(data)
        before = counters["stats"]["unique_graphs"]
        for _ in range(2):
            model.train()
            found[compiles] = validation.measure(model)
        assert counters["stats"]["unique_graphs"] - before == int(compiles)
    each = [found[compiles].results.per_unit["val_loss"] for compiles in (True, False)]
    np.testing.assert_allclose(*each, rtol=1e-6)


def test_only_a_compiled_run_on_a_gpu_compiles_its_evaluations():
    runtime = Runtime()
    runtime.is_distributed = True
    cases = {("cpu", "on", "ddp"): False}
    cases |= {("cuda", "on", mode): True for mode in ("ddp", "zero1")}
    cases |= {("cuda", "off", "ddp"): False, ("cuda", "on", "fsdp"): False}
    for (device, compile, parallel), expected in cases.items():
        runtime.device = torch.device(device)
        system: Any = {"compile": compile, "parallel": parallel, "dtype": "bf16"}
        assert Strategy(runtime, SystemConfig(**system)).compiles_evaluation == expected
