"""A ckpt.pt of nanoGPT becomes a run with its own settings; the files are written here in nanoGPT's exact format."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override, to_flat
from gpt2lab.interop.nanogpt import entries_of
from gpt2lab.optim.schedule import lr_at
from launch import call
from tiny import parse
from token_files import SPEECH, write_characters

LETTERS = sorted(set(SPEECH))
ITERS, LAST, WIDTH, LAYERS, BLOCK, BATCH = 6, 9, 16, 2, 8, 3

# All that train.py writes as `config`: its globals that are numbers, texts and truth values.
CONFIG: dict[str, Any] = {
    **{"out_dir": "out", "eval_interval": 3, "log_interval": 1, "eval_iters": 4},
    **{"eval_only": False, "always_save_checkpoint": True, "init_from": "scratch"},
    **{"wandb_log": False, "wandb_project": "owt", "wandb_run_name": "gpt2"},
    **{"dataset": "letters", "gradient_accumulation_steps": 2, "batch_size": BATCH},
    **{"block_size": BLOCK, "n_layer": LAYERS, "n_head": 2, "n_embd": WIDTH, "dropout": 0.0},
    **{"bias": False, "learning_rate": 1e-2, "max_iters": LAST, "weight_decay": 0.05},
    **{"beta1": 0.8, "beta2": 0.99, "grad_clip": 0.5, "decay_lr": True, "warmup_iters": 2},
    **{"lr_decay_iters": LAST, "min_lr": 1e-3, "backend": "nccl", "device": "cpu"},
    **{"dtype": "bfloat16", "compile": False},
}


def their_rate(it: int, config: dict[str, Any]) -> float:
    """Return the rate of update `it` = 0, 1, ... as get_lr of nanoGPT's train.py computes it."""
    if not config["decay_lr"]:
        return config["learning_rate"]
    if it < config["warmup_iters"]:
        return config["learning_rate"] * (it + 1) / (config["warmup_iters"] + 1)
    if it > config["lr_decay_iters"]:
        return config["min_lr"]
    span = config["lr_decay_iters"] - config["warmup_iters"]
    coefficient = 0.5 * (1.0 + math.cos(math.pi * (it - config["warmup_iters"]) / span))
    return config["min_lr"] + coefficient * (config["learning_rate"] - config["min_lr"])


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the parameters of a model without biases, in the order of nanoGPT's state_dict."""
    found = {"transformer.wte.weight": (len(LETTERS), WIDTH)}
    found["transformer.wpe.weight"] = (BLOCK, WIDTH)
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}"
        found |= {
            f"{block}.ln_1.weight": (WIDTH,),
            f"{block}.attn.c_attn.weight": (3 * WIDTH, WIDTH),
            f"{block}.attn.c_proj.weight": (WIDTH, WIDTH),
            f"{block}.ln_2.weight": (WIDTH,),
            f"{block}.mlp.c_fc.weight": (4 * WIDTH, WIDTH),
            f"{block}.mlp.c_proj.weight": (WIDTH, 4 * WIDTH),
        }
    return found | {"transformer.ln_f.weight": (WIDTH,)}


def checkpoint(**changes: Any) -> dict[str, Any]:
    """Return what nanoGPT saves after ITERS updates of a model of characters; `changes`: of its config."""
    config = CONFIG | changes
    draw = torch.Generator().manual_seed(3)
    model = {
        name: torch.ones(shape) if "ln_" in name else 0.02 * torch.randn(shape, generator=draw)
        for name, shape in shapes().items()
    }
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in model.items()}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.05},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(config["beta1"], config["beta2"]))
    for _ in range(ITERS):
        for parameter in parameters.values():
            parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = their_rate(ITERS, config)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    shape = {name: config[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "bias")}
    return {
        "model": weights | {"lm_head.weight": weights["transformer.wte.weight"]},
        "optimizer": optimizer.state_dict(),
        "model_args": {**shape, "vocab_size": len(LETTERS), "dropout": config["dropout"]},
        "iter_num": ITERS,
        "best_val_loss": torch.tensor(3.25),
        "config": config,
    }


@pytest.fixture
def place(tmp_path) -> Path:
    """Return a folder with nanoGPT's data of characters, imported, and its ckpt.pt."""
    assert call("data", "import", write_characters(tmp_path / "letters")).returncode == 0
    torch.save(checkpoint(), tmp_path / "ckpt.pt")
    return tmp_path


def take(place: Path, *more: str, data: bool = True) -> launch.Done:
    words = [f"--import_checkpoint={place / 'ckpt.pt'}", "--run_name=r", "--device=cpu"]
    words += [f"--data_dir={place / 'letters'}"] if data else []
    return call(launch.TRAIN, *words, f"--checkpoint_dir={place / 'runs'}", *more)


def read_config(place: Path) -> dict[str, Any]:
    return json.loads((place / "runs" / "r" / "config.json").read_text())


def test_the_run_has_nanogpts_settings_and_goes_on_with_its_rates(place):
    done = take(place, "--sample_prompt=First", "--sample_tokens=5", "--hellaswag_path=None")
    assert done.returncode == 0, done.stderr
    table = " ".join(done.stdout.split())
    batch = "batch_size 3 x gradient_accumulation_steps 2 x block_size 8 total_batch_size 48"
    assert batch in table
    assert "exact GELU tanh GELU" in table
    assert "trained without biases biases of zero" in table
    assert "best in the file 3.2500" in table
    rate = f"{their_rate(ITERS, CONFIG):.6g}"
    assert f"rate of the next step {rate} {rate}" in table
    config = read_config(place)
    wanted = {
        **{"total_batch_size": 48, "mini_batch_size": 3, "max_lr": 0.01, "min_lr": 0.001},
        **{"warmup_steps": 3, "max_steps": 10, "lr_schedule": "cosine", "weight_decay": 0.05},
        **{"beta1": 0.8, "beta2": 0.99, "grad_clip": 0.5, "dropout": 0.0, "dtype": "fp32"},
        **{"eval_freq": 3, "checkpoint_freq": 3, "val_tokens": 96, "shuffle": "windows"},
        **{"vocab_size": 128, "num_tokens": len(LETTERS)},
    }
    assert {name: config[name] for name in wanted} == wanted
    run = place / "runs" / "r"
    (first,) = launch.events(run, "eval")
    assert first["step"] == ITERS
    assert f"val loss {first['val_loss']:.4f}" in table
    call_on = ["--run_name=r", f"--checkpoint_dir={place / 'runs'}", "--resume=latest"]
    assert call(launch.TRAIN, *call_on, "--compile=off").returncode == 0
    rates = {event["step"]: event["lr"] for event in launch.events(run, "step")}
    assert rates == pytest.approx({it + 1: their_rate(it, CONFIG) for it in range(ITERS, LAST + 1)})
    assert launch.events(run, "sample")[-1]["text"].startswith("First")


def test_characters_are_sampled_and_talked_to(place):
    """The end of text, which nanoGPT has no row for, may begin a text, and is never drawn."""
    assert take(place).returncode == 0
    runs = f"--checkpoint_dir={place / 'runs'}"
    for prompt in ("First", ""):
        done = call("sample.py", "r", runs, f"--prompt={prompt}", "--max_new_tokens=20")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout) == len(prompt) + 20 + 1
        assert {*done.stdout} <= {*SPEECH}
    done = launch.worked(call("chat", "r", runs, "--max_new_tokens=4", stdin="hear me\né\nspeak\n"))
    assert "its tokenizer cannot write the chat template" in done.stderr
    assert "U+00E9" in done.stderr
    assert {*done.stdout} <= {*SPEECH}


def test_the_imported_weights_compute_nanogpts_loss(place):
    """The validation loss, computed again from the file alone: no padding row, no end of text in the softmax."""
    from torch.nn import functional as F

    assert take(place).returncode == 0
    (event,) = launch.events(place / "runs" / "r", "eval")
    w = checkpoint()["model"]
    ids = torch.tensor([LETTERS.index(one) for one in SPEECH])
    windows = (len(ids) - 1) // BLOCK
    chosen = torch.arange(96 // BLOCK) * windows // (96 // BLOCK)
    rows = torch.stack([ids[k * BLOCK : (k + 1) * BLOCK + 1] for k in chosen.tolist()])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), w[f"transformer.{name}.weight"])

    x = w["transformer.wte.weight"][rows[:, :-1]] + w["transformer.wpe.weight"]
    for layer in range(LAYERS):
        block = f"h.{layer}"
        qkv = F.linear(norm(x, f"{block}.ln_1"), w[f"transformer.{block}.attn.c_attn.weight"])
        heads = (part.view(*part.shape[:2], 2, -1) for part in qkv.split(WIDTH, dim=2))
        q, k, v = (part.transpose(1, 2) for part in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, w[f"transformer.{block}.attn.c_proj.weight"])
        y = F.gelu(F.linear(norm(x, f"{block}.ln_2"), w[f"transformer.{block}.mlp.c_fc.weight"]))
        x = x + F.linear(y, w[f"transformer.{block}.mlp.c_proj.weight"])
    logits = F.linear(norm(x, "ln_f"), w["transformer.wte.weight"])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert event["val_loss"] == pytest.approx(loss, abs=1e-5)  # tanh in place of the exact GELU


def test_everything_that_is_wrong_is_said_at_once(place):
    words = ("--optimizer=muon", "--n_layer=3", "--n_head=4")
    missing = "--data_dir is missing: the folder data/letters"
    for data, more in ((False, missing), (True, "--n_head 4")):
        line = launch.rejected(take(place, *words, data=data))
        for part in ("holds AdamW's moments", "--n_layer 3: ckpt.pt has 2", "--n_head 4", more):
            assert part in line
    odd = checkpoint()
    odd["config"] |= {"batch_size": "twelve", "warmup_iters": 1.5}
    torch.save(odd, place / "ckpt.pt")
    done = take(place)
    assert "batch_size 'twelve' in its config is not of type int" in done.stderr
    assert "warmup_iters 1.5 in its config is not of type int" in done.stderr
    broken = checkpoint()
    del broken["model"]["transformer.h.1.ln_2.weight"], broken["model_args"]["n_head"]
    del broken["config"]["n_head"]
    torch.save(broken, place / "ckpt.pt")
    done = take(place, "--optimizer=muon")
    for part in ("no n_head", "no tensor blocks.1.ln_2.weight", "holds AdamW's moments"):
        assert part in done.stderr
    assert not (place / "runs").exists()


@pytest.mark.parametrize("content", [b"# A readme\n", b"", b"PK\x03\x04 no archive", b"\x80\x02."])
def test_what_is_no_checkpoint_is_not_to_be_trusted(place, content):
    (place / "ckpt.pt").write_bytes(content)
    line = launch.rejected(take(place))
    assert ("not a checkpoint that torch.save" in line, "--trust" in line) == (True, False)


def test_what_is_typed_wins(place):
    done = launch.worked(take(place, "--max_lr=0.02", "--max_tokens=4800", "--total_batch_size=24"))
    config = read_config(place)
    names = ("max_lr", "max_tokens", "max_steps", "total_batch_size", "min_lr")
    assert [config[name] for name in names] == [0.02, 4800, None, 24, 0.001]
    (length,) = [line for line in done.stdout.splitlines() if line.startswith("lr_decay_iters")]
    assert "max_tokens 4800" in length
    assert length.endswith("as typed")
    assert "the schedules differ" in done.stdout


def test_a_settings_file_wins_over_nanogpt_and_what_is_typed_over_both(place):
    file = place / "a.toml"
    file.write_text("max_lr = 0.02\neval_freq = 5\nmax_tokens = 4800\n")
    done = launch.worked(take(place, f"--config={file}", "--eval_freq=4"))
    config = read_config(place)
    names = ("max_lr", "eval_freq", "max_tokens", "max_steps", "min_lr", "total_batch_size")
    assert [config[name] for name in names] == [0.02, 4, 4800, None, 0.001, 48]
    table = " ".join(done.stdout.split())
    assert "learning_rate 0.01 max_lr 0.02 as in the file of --config" in table
    assert "eval_freq 4, checkpoint_freq 3 as typed" in table
    assert "max_tokens 4800 as in the file of --config" in table


def test_a_run_s_config_json_serves_an_import_with_the_weights_vocabulary(place):
    assert take(place, "--log_freq=7").returncode == 0
    launch.worked(take(place, f"--config={place / 'runs' / 'r' / 'config.json'}", "--run_name=b"))
    config = json.loads((place / "runs" / "b" / "config.json").read_text())
    chosen = {"chosen": config["chosen"]}  # all that the file held
    assert config == read_config(place) | {"run_name": "b"} | chosen


def test_a_run_that_only_warms_up_goes_on_with_its_rates(place):
    longer = {"warmup_iters": 100}
    torch.save(checkpoint(**longer), place / "ckpt.pt")
    done = launch.worked(take(place))
    rate = f"{their_rate(ITERS, CONFIG | longer):.6g}"
    table = " ".join(done.stdout.split())
    assert f"rate of the next step {rate} {rate}" in table
    assert "max_steps 10 nanoGPT only warms up" in table
    config = read_config(place)
    assert (config["warmup_steps"], config["max_steps"]) == (10, 10)


def test_a_precision_that_this_machine_lacks_is_said(place, monkeypatch):
    """Whether the test's own machine has bf16 or not."""
    monkeypatch.setattr("gpt2lab.distributed.runtime.fastest_dtype", lambda device: "fp32")
    torch.save(checkpoint(device="cuda"), place / "ckpt.pt")
    said = " ".join(launch.worked(take(place)).stdout.split())
    line = "dtype bfloat16 on cuda dtype fp32 no bf16 on this machine; on a GPU resume with"
    assert f"{line} --device cuda --dtype bf16 --allow_change dtype" in said


@settings(max_examples=300, deadline=None)
@given(
    decays=st.booleans(),
    warmup=st.integers(0, 20),
    span=st.integers(-20, 50).filter(lambda span: span != 0),
    extra=st.integers(-5, 30),
    done=st.integers(0, 80),
)
def test_the_schedule_is_nanogpts(decays, warmup, span, extra, done):
    """Every rate from the imported step on, until ours or nanoGPT's run ends."""
    decay = max(0, warmup + span)
    if decay == warmup:
        decay += 1  # nanoGPT itself would divide by zero
    config = CONFIG | {"decay_lr": decays, "warmup_iters": warmup, "lr_decay_iters": decay}
    config["max_iters"] = max(1, decay + extra)
    values: dict[str, Any] = {}
    for entry in entries_of(config, block_size=BLOCK, done=done):
        values |= entry.settings
    ours = override(Config(), values)
    steps = ours.length.max_steps
    for it in range(done, min(steps, config["max_iters"] + 1)):
        rate = lr_at(it + 1, ours.optim, max_steps=steps)
        assert rate == pytest.approx(their_rate(it, config), rel=1e-9)
    ends_with_warmup = decays and done < warmup and decay < warmup
    if not ends_with_warmup and (extra <= 0 or done > decay or not decays):
        assert steps >= config["max_iters"] + 1, "it does not end before nanoGPT's"


def test_settings_are_read_where_all_that_they_need_is_there_and_a_precision_as_it_is_used():
    found = entries_of({"batch_size": 4, "learning_rate": 1e-3}, block_size=8, done=0)
    assert [entry.settings for entry in found] == [{"mini_batch_size": 4}]
    for device, dtype, ours in (
        *(("cuda", "float16", "fp16"), ("cuda", "bfloat16", "auto"), ("cuda", "float32", "fp32")),
        ("cpu", "bfloat16", "fp32"),  # nanoGPT uses autocast on GPUs alone
        ("mps", "bfloat16", "fp32"),
        ("mps", "float16", "fp32"),
    ):
        found = entries_of({"dtype": dtype, "device": device}, block_size=8, done=0)
        assert [entry.settings for entry in found] == [{"dtype": ours}]


def test_the_commands_parse_what_is_taken():
    values: dict[str, Any] = {}
    for entry in entries_of(CONFIG, block_size=BLOCK, done=0):
        values |= entry.settings
    request = parse([f"--{name}={value}" for name, value in values.items()])
    assert request.typed == values.keys()
    assert {name: to_flat(request.config)[name] for name in values} == values
