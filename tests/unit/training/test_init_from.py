"""--init_from: a fresh run that begins with the weights of another, on any number of processes, and resumes as any."""

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import launch
from gpt2lab.config.presets import PRESETS, preset
from gpt2lab.errors import CheckpointError, ConfigError
from tiny import CONTEXT, VOCAB, parse, pretrain, resolved, write_shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with data, the run `base` of four steps, and a Hugging Face GPT-2 `hf`; treat as read-only."""
    folder = tmp_path_factory.mktemp("init_from")
    write_shards(folder / "data", train=(2000,), val=(650,))
    shape = ("--n_layer=2", "--n_head=2", "--n_embd=32", f"--context_length={CONTEXT}")
    train(folder, folder / "runs", "base", *shape, f"--vocab_size={VOCAB}", "--seed=3")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=24, vocab_size=300)
    GPT2LMHeadModel(config).save_pretrained(folder / "hf")
    return folder


def flags(folder: Path, runs: Path, name: str, *more: str) -> list[str]:
    return [
        *(f"--data_dir={folder / 'data'}", f"--checkpoint_dir={runs}", f"--run_name={name}"),
        *("--mini_batch_size=2", "--max_steps=4", "--eval_freq=2", "--checkpoint_freq=2"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--val_tokens=240", "--max_lr=0.01"),
        *more,
    ]


def train(folder: Path, runs: Path, name: str, *more: str, batch: int = 128) -> Path:
    pretrain(parse(flags(folder, runs, name, f"--total_batch_size={batch}", *more)))
    return runs / name


def first_loss(run_dir: Path) -> float:
    (event,) = (event for event in launch.events(run_dir, "eval") if event["step"] == 0)
    return float(event["val_loss"])


def rejection(folder: Path, runs: Path, *more: str) -> str:
    """Return the one line that a start is rejected with; nothing may have been written."""
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        train(folder, runs, "new", *more, batch=96)
    assert not runs.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_begins_where_another_ended(folder, tmp_path):
    """Weights and architecture come; optimizer, step count, data position and schedule do not."""
    source = folder / "runs" / "base"
    run = train(folder, tmp_path, "new", f"--init_from={source}")
    ended = launch.events(source, "eval")[-1]["val_loss"]
    assert first_loss(run) == ended < first_loss(source)
    steps, before = launch.steps(run), launch.steps(source)
    assert list(steps) == [1, 2, 3, 4]
    for number, event in steps.items():
        first = before[number]
        assert (event["first_sample"], event["lr"]) == (first["first_sample"], first["lr"])
    config = json.loads((run / "config.json").read_text())
    assert (config["n_layer"], config["n_embd"], config["vocab_size"]) == (2, 32, VOCAB)
    assert config["init_from"] == str(source)
    record = json.loads((run / "run.json").read_text())["initial_weights"]
    known = {"folder": str(source / "step_00000004"), "sha256": launch.parameter_hash(source, 4)}
    assert record == {"init_from": str(source), "step": 4, **known}
    again = train(folder, tmp_path, "seed", f"--init_from={source}", "--seed=9")
    assert first_loss(again) == ended, "the seed decides data order, not these weights"


def test_a_hugging_face_folder_gives_its_weights_and_shape(folder, tmp_path):
    hf = folder / "hf"
    run = train(folder, tmp_path, "new", f"--init_from={hf}", "--dropout=0.1", batch=96)
    config = json.loads((run / "config.json").read_text())
    assert [config[n] for n in ("n_layer", "n_head", "n_embd")] == [1, 2, 16]
    assert (config["context_length"], config["vocab_size"], config["dropout"]) == (24, 300, 0.1)
    theirs = GPT2LMHeadModel.from_pretrained(hf).eval()
    tokens = torch.from_numpy(np.load(folder / "data" / "tiny_val_000000.npy").astype("int64"))
    # the 10 windows that are spread evenly over 27
    starts = [(i * 27 // 10) * 24 for i in range(10)]
    windows = torch.stack([tokens[s : s + 25] for s in starts])
    with torch.no_grad():
        expected = theirs(windows[:, :-1], labels=None).logits
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), windows[:, 1:].flatten())
    assert first_loss(run) == pytest.approx(float(loss), rel=1e-4)


def test_a_resume_needs_the_source_no_more_and_gives_the_same_bits(folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folder / "hf", source)
    begin = f"--init_from={source}"
    straight = train(folder, tmp_path, "straight", begin, batch=96)
    train(folder, tmp_path, "halves", begin, "--stop_after_steps=2", batch=96)
    shutil.rmtree(source)
    halves = train(folder, tmp_path, "halves", "--resume=latest", begin, batch=96)
    assert launch.losses(halves) == launch.losses(straight)
    assert launch.parameter_hash(halves, 4) == launch.parameter_hash(straight, 4)
    facts = [json.loads((run / "run.json").read_text()) for run in (straight, halves)]
    assert facts[0]["initial_weights"] == facts[1]["initial_weights"] is not None


def test_auto_begins_from_the_source_once_and_a_resume_has_no_other_beginning(folder, tmp_path):
    shutil.copytree(folder / "runs" / "base", tmp_path / "base")
    words = flags(folder, tmp_path, "base", "--resume=latest", f"--init_from={folder / 'hf'}")
    with pytest.raises(ConfigError, match="init_from None"):
        resolved(words)
    more = (f"--init_from={folder / 'hf'}", "--resume=auto")
    run = train(folder, tmp_path, "new", *more, "--stop_after_steps=2", batch=96)
    train(folder, tmp_path, "new", *more, batch=96)
    assert (list(launch.steps(run)), len(launch.events(run, "resume"))) == ([1, 2, 3, 4], 1)


def test_a_shorter_context_keeps_the_first_positions(folder, tmp_path):
    begin = (f"--init_from={folder / 'hf'}", "--context_length=8", "--max_lr=1e-30")
    run = train(folder, tmp_path, "new", *begin, "--weight_decay=0", batch=64)
    found = safetensors.torch.load_file(run / "step_00000004" / "model.safetensors")
    theirs = safetensors.torch.load_file(folder / "hf" / "model.safetensors")
    assert torch.equal(found["wpe.weight"], theirs["transformer.wpe.weight"][:8])
    assert torch.equal(found["wte.weight"], theirs["transformer.wte.weight"])


@pytest.mark.parametrize(
    "typed",
    [
        *("--n_layer=3", "--n_head=4", "--vocab_size=50304", "--model=gpt2-nano"),
        "--context_length=32",
    ],
)
def test_another_architecture_is_rejected(typed, folder, tmp_path, wording):
    wording(rejection(folder, tmp_path / "runs", f"--init_from={folder / 'hf'}", typed))


def test_a_missing_or_damaged_source_is_rejected_before_anything_is_written(folder, tmp_path):
    assert "no run of" in rejection(folder, tmp_path / "runs", "--init_from=no/such/run")
    shutil.copytree(folder / "hf", tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    line = rejection(folder, tmp_path / "runs", f"--init_from={tmp_path / 'hf'}")
    assert str(weights) in line
    weights.unlink()
    assert str(weights) in rejection(folder, tmp_path / "runs", f"--init_from={tmp_path / 'hf'}")


def test_the_hub_is_asked_for_hf_names_and_the_shapes_preset_is_used(folder, tmp_path, monkeypatch):
    asked = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(medium)

    medium = tmp_path / "medium"
    medium.mkdir()
    config = GPT2Config(n_layer=24, n_head=16, n_embd=1024)
    config.save_pretrained(medium)
    shapes = {"wte.weight": (50257, 1024), "wpe.weight": (1024, 1024)}
    shapes |= {f"h.{block}.ln_1.bias": (1024,) for block in range(24)}
    end, header = 0, {}
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    with open(medium / "model.safetensors", "wb") as file:  # a header; the rest is never read here
        text = json.dumps(header).encode()
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "gpt2-medium").mkdir()  # a folder of this name is not what hf: means
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    words = flags(folder, tmp_path / "runs", "new")[:-1]  # without its --max_lr
    words += ["--init_from=hf:gpt2-medium", "--total_batch_size=4096", "--context_length=512"]
    start = resolved(words)
    assert (asked, start.config.optim.max_lr) == (["gpt2-medium"], PRESETS["gpt2-medium"]["max_lr"])
    expected = preset("gpt2-medium").model
    assert start.config.model == type(expected)(**{**vars(expected), "context_length": 512})


@pytest.mark.slow
def test_two_processes_begin_with_the_same_weights(folder, tmp_path):
    """The worker compares the weights of all ranks after every step."""
    alone = train(folder, tmp_path, "one", f"--init_from={folder / 'hf'}", batch=96)
    more = ("--total_batch_size=96", f"--init_from={folder / 'hf'}")
    typed, program = flags(folder, tmp_path, "two", *more), launch.WORKERS / "ranks_agree.py"
    done = launch.worked(launch.train_in_forks(typed, world=2, program=program))
    assert done.stdout.count("compared 4 steps") == 2
    expected = launch.steps(alone)
    for number, event in launch.steps(tmp_path / "two").items():
        assert event["loss"] == pytest.approx(expected[number]["loss"], rel=1e-5)
