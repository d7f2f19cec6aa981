"""LoRA: what is trained, what is saved, and that it is peft's."""

import dataclasses
from importlib.metadata import version
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

import launch
from conversations import CONTEXT, finetune, flags_of, order_of, rows_of, write_both
from ecosystem import works_with
from gpt2lab.config.derived import BatchPlan
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import Config, OptimConfig, SystemConfig, TuningConfig
from gpt2lab.config.settings import SIZES, override
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError
from gpt2lab.finetuning.packed import PackedGPT, RowLoader
from gpt2lab.model.counts import checkpoint_bytes
from gpt2lab.model.gpt import GPT, build_model, empty_model
from gpt2lab.model.lora import LoRALinear, add_lora, init_adapters, merge_lora
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.runs.history import read_config
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers.gpt2 import GPT2, NUM_TOKENS
from gpt2lab.training.train_step import train_step
from launch import ask

TUNING = TuningConfig(lora_r=4, lora_alpha=8.0, lora_targets="attn.c_attn,c_fc,c_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a model, pairs, and the run `lora`; treat as read-only."""
    folder = write_both(tmp_path_factory.mktemp("lora"))
    finetune(flags_of(folder, folder / "runs", "lora", "--lora_r=2", "--max_lr=0.05"))
    return folder


def load(folder: Path, name: str = "hf") -> GPT:
    target = find_target(str(folder / name) if name == "hf" else name, folder / "runs")
    return load_weights(target)


@pytest.mark.parametrize("is_speedrun", [False, True])
def test_new_adapters_compute_nothing_and_merged_ones_the_same(folder, is_speedrun):
    model, ids = load(folder), torch.arange(30).view(2, 15)
    if is_speedrun:
        sizes = {name: getattr(model.config, name) for name in (*SIZES, "num_tokens")}
        config = dataclasses.replace(preset("speedrun").model, **sizes)
        model = build_model(config, seed=1, device=torch.device("cpu"))
    before, names = model(ids), {n for n, _ in model.named_parameters()}
    add_lora(model, TUNING)
    init_adapters(model, seed=1)
    assert torch.equal(model(ids), before)
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert len(adapters) == 4  # c_attn, two c_proj, c_fc of the one layer
    for adapter in adapters:
        bound = adapter.in_features**-0.5
        assert 0.8 * bound < adapter.lora_A.abs().max() <= bound
        with torch.no_grad():
            adapter.lora_B.normal_()
    tuned = model(ids)
    assert (tuned - before).abs().max() > 0.1
    merge_lora(model)
    assert not any(isinstance(m, LoRALinear) for m in model.modules())
    torch.testing.assert_close(model(ids), tuned, rtol=1e-5, atol=1e-5)
    assert {n for n, _ in model.named_parameters()} == names
    assert all(p.requires_grad for p in model.parameters())


def test_adapters_depend_on_the_seed_alone(folder):
    def drawn(seed: int) -> torch.Tensor:
        model = load(folder)
        add_lora(model, TUNING)
        torch.rand(3)
        init_adapters(model, seed=seed)
        return torch.cat([p.reshape(-1) for n, p in model.named_parameters() if "lora_A" in n])

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_a_run_trains_adapters_alone_and_its_checkpoint_stands_on_its_own(folder):
    run = folder / "runs" / "lora"
    evals = launch.events(run, "eval")
    assert evals[-1]["val_loss"] < evals[0]["val_loss"] - 0.01
    base = dict(load(folder).named_parameters())
    saved = safetensors.torch.load_file(run / "step_00000006" / "model.safetensors")
    assert all(torch.equal(saved[name], parameter) for name, parameter in base.items())
    adapters = set(saved) - set(base)
    assert len(adapters) == 8
    assert all(saved[name].abs().max() > 0 for name in adapters)
    moments = safetensors.torch.load_file(run / "step_00000006" / "optim.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == adapters
    total = sum(4 * t.numel() for t in (*saved.values(), *moments.values()) if t.dim() > 0)
    assert total == checkpoint_bytes(read_config(run))
    told = "trains         512 parameters; the others are frozen"  # r (in + out) of each layer
    assert told in (run / "log.txt").read_text()
    flags = [f"--checkpoint_dir={folder / 'runs'}", "--run_name=lora", "--resume=latest"]
    with pytest.raises(ConfigError, match="lora_r 2 -> 4"):  # another architecture
        finetune([*flags, "--lora_r=4"])


def test_the_commands_see_the_merged_weights(folder, tmp_path):
    """Evaluation, sample and export of a run with adapters; the export is compared with transformers by the command."""
    logged = launch.events(folder / "runs" / "lora", "eval")[-1]
    answer = ask("evaluate.py", "lora", "--json", folder=folder)
    assert answer["val_loss"] == pytest.approx(logged["val_loss"], rel=1e-5)
    assert answer["val_tokens"] == logged["val_tokens"]
    out = tmp_path / "export"
    ask("export_hf.py", "lora", f"--out={out}", "--json", folder=folder)
    card = (out / "README.md").read_text()
    assert "| training data | `pairs.jsonl`, fingerprint" in card
    assert "| adapters | LoRA of rank 2" in card
    again = dict(load_weights(find_target(str(out), folder)).named_parameters())
    base = dict(load(folder).named_parameters())
    for name, parameter in load(folder, "lora").named_parameters():
        assert torch.equal(again[name], parameter[: len(again[name])])
        tuned = name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))
        assert torch.equal(again[name], base[name][: len(again[name])]) == (not tuned)


def batches(folder: Path, steps: int) -> list[GlobalBatch]:
    rows, plan = rows_of(folder, "off")["train"], BatchPlan(4, 2, 2, 1, CONTEXT)
    loader = RowLoader(order_of(rows), rows, plan, rank=0, device=torch.device("cpu"))
    return [loader.fetch(4 * step) for step in range(steps)]


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
def test_losses_are_those_of_peft(folder):
    """20 steps in fp32: same base, same A and B, same batches; peft's model under torch's AdamW."""
    peft = pytest.importorskip("peft", reason="peft is not installed (requirements-dev.txt)")
    from transformers import GPT2LMHeadModel

    works_with("peft", version("peft"), "20 LoRA steps: same losses, same adapters")
    rate, steps = 5e-2, batches(folder, 20)
    padded = load(folder)  # transformers' softmax knows the 50257 real rows alone
    model = empty_model(dataclasses.replace(padded.config, vocab_size=NUM_TOKENS))
    parameters = dict(padded.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name][: len(parameter)])
    add_lora(model, TUNING)
    init_adapters(model, seed=1)
    config = peft.LoraConfig(
        r=TUNING.lora_r,
        lora_alpha=TUNING.lora_alpha,
        target_modules=TUNING.lora_targets.split(","),
        lora_dropout=0.0,
        fan_in_fan_out=True,  # transformers' GPT-2 keeps its weights transposed
    )
    theirs = peft.get_peft_model(GPT2LMHeadModel.from_pretrained(folder / "hf"), config)
    ours = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert sum(p.requires_grad for p in theirs.parameters()) == len(ours) == 8
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                layer, _, matrix = name.removesuffix(".default.weight").rpartition(".")
                layer = layer.removeprefix("base_model.model.transformer.")
                parameter.copy_(ours[f"{layer.replace('h.', 'blocks.', 1)}.{matrix}"])
    optim = override(Config(), {"max_lr": rate, "weight_decay": 0.0}).optim
    optimizers = build_optimizers(model, optim)
    tuned = [p for p in theirs.parameters() if p.requires_grad]
    how = {"betas": (optim.beta1, optim.beta2), "eps": OptimConfig.adam_eps, "weight_decay": 0.0}
    reference = torch.optim.AdamW(tuned, lr=rate, **how)
    strategy = Strategy(Runtime(), SystemConfig(dtype="fp32"))
    trained, found, expected = PackedGPT(model, GPT2.end_of_text), [], []
    for batch in steps:
        how = {"strategy": strategy, "grad_clip": 0.0, "seed": 1}
        found.append(train_step(trained, optimizers, batch, rate, **how).loss)
        tokens = torch.cat([micro.tokens for micro in batch.micro_batches])
        targets = torch.cat([micro.targets for micro in batch.micro_batches])
        logits = theirs(tokens).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1)
        loss.backward()
        reference.step()
        reference.zero_grad()
        expected.append(loss.item())
    assert sum(expected[-4:]) < sum(expected[:4]) - 4 * 0.05, "nothing was learned"
    assert found == pytest.approx(expected, abs=1e-4)
