"""Files of other GPT-2 trainers become checkpoints of ours: the same weights and moments, or a rejection in one line.

The files are written here by hand, in the layouts of nanoGPT and of the program that this one replaces.
"""

import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import launch
from gpt2lab.errors import CheckpointError, ConfigError
from gpt2lab.interop.foreign import read_foreign
from gpt2lab.interop.import_checkpoint import import_checkpoint
from gpt2lab.interop.model_card import write_card
from gpt2lab.runs.target import find_target
from tiny import parse
from whole_run import Run

DONE, LAST = 4, 8  # steps of the run that the files are made from, steps of the one they become
NANO = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 256, "bias": True}


@dataclass
class GPTConfig:
    """What the older program pickles as its settings."""

    context_length: int = 16
    vocab_size: int = 256
    num_layers: int = 2
    embd_size: int = 32
    num_heads: int = 2


@pytest.fixture(scope="module")
def origin(tiny_run) -> Run:
    """Return a run of four steps; read only."""
    return tiny_run(max_steps=LAST, eval_freq=0, stop_after_steps=DONE)


@pytest.fixture
def become(tiny_data, tmp_path) -> Run:
    return Run(tiny_data, tmp_path / "runs", f"--max_steps={LAST}", "--eval_freq=0")


def tensors(origin: Run, name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(origin.path / f"step_{DONE:08d}" / name)


def their_names() -> list[str]:
    """Return the parameters in the order in which such a model declares them."""
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    blocks = [f"h.{i}.{part}.{kind}" for i in "01" for part in parts for kind in ("weight", "bias")]
    names = ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"]
    return [f"transformer.{name}" for name in names]


def our(name: str) -> str:
    return re.sub(r"^h\.", "blocks.", name.removeprefix("transformer."))


def model_of(origin: Run, prefix: str = "") -> dict[str, torch.Tensor]:
    ours = tensors(origin, "model.safetensors")
    model = {f"{prefix}{name}": ours[our(name)] for name in their_names()}
    model[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # a causal mask
    model[f"{prefix}lm_head.weight"] = ours["wte.weight"]
    return model


def optimizer_of(origin: Run, *, bias: bool = True) -> dict[str, Any]:
    weights, moments = tensors(origin, "model.safetensors"), tensors(origin, "optim.safetensors")
    names = [our(name) for name in their_names() if bias or not name.endswith(".bias")]
    names.sort(key=lambda name: weights[name].dim() < 2)  # matrices first
    first, keys = sum(weights[n].dim() >= 2 for n in names), ("step", "exp_avg", "exp_avg_sq")
    state = {n: {k: moments[f"{name}/{k}"] for k in keys} for n, name in enumerate(names)}
    groups = [{"params": list(x), "lr": 1e-3} for x in (range(first), range(first, len(names)))]
    return {"state": state, "param_groups": groups}


def nano(origin: Run, **changes: Any) -> dict[str, Any]:
    content = {
        **{"model": model_of(origin, "_orig_mod."), "optimizer": optimizer_of(origin)},
        **{"model_args": NANO, "iter_num": DONE, "best_val_loss": torch.tensor(5.0)},
        "config": {"dataset": "shakespeare", "batch_size": 12},
    }
    return {name: value for name, value in (content | changes).items() if value is not None}


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def take(run: Run, file: Path, *more: str) -> None:
    request = parse([*run.flags, f"--import_checkpoint={file}", *more])
    import_checkpoint(request, file, trust="--trust" in more)


def test_a_model_without_biases_gets_some_that_are_zero(origin, become, tmp_path, capsys):
    """NanoGPT's default. Zero biases compute the same, so nothing but the names of the tensors changes."""
    weights = {k: v for k, v in model_of(origin).items() if not k.endswith(".bias")}
    content = nano(origin, model=weights, optimizer=optimizer_of(origin, bias=False))
    take(become, write(tmp_path / "ckpt.pt", content))
    assert "trained without biases" in capsys.readouterr().out
    folder = become.path / f"step_{DONE:08d}"
    model = safetensors.torch.load_file(folder / "model.safetensors")
    moments = safetensors.torch.load_file(folder / "optim.safetensors")
    theirs = tensors(origin, "model.safetensors")
    for name, tensor in model.items():
        if name.endswith(".bias"):
            assert not tensor.any() | moments[f"{name}/exp_avg"].any()
            assert moments[f"{name}/step"] == DONE
        else:
            assert torch.equal(tensor, theirs[name])
    become.train("--resume=latest")
    after = safetensors.torch.load_file(become.path / f"step_{LAST:08d}" / "model.safetensors")
    assert all(tensor.any() for name, tensor in after.items() if name.endswith(".bias"))


def test_nanogpt_becomes_a_run_that_goes_on(origin, become, tmp_path, capsys):
    take(become, write(tmp_path / "ckpt.pt", nano(origin)), "--shuffle=shards")
    told = capsys.readouterr().out
    assert become.hashes(DONE) == origin.hashes(DONE), "weights, moments, counts, bit by bit"
    assert f"step {DONE} of {LAST}" in told
    assert ("optimizer as in the file" in told, "data begins at sample 0" in told) == (True, True)
    assert "exact GELU" in told
    [record] = become.saved_state(DONE)["history"]
    assert (record["imported"], record["samples"], len(record["sha256"])) == ("ckpt.pt", 0, 64)
    become.train("--resume=latest")
    assert become.status()["state"] == "completed"
    steps = {event["step"]: event["batch_hash"] for event in become.events("step")}
    assert list(steps) == [5, 6, 7, 8]
    first = {event["step"]: event["batch_hash"] for event in origin.events("step")}
    assert steps[DONE + 1] == first[1]
    numbers = {"out": "x", "dtype": "float32", "parameters": 1, "max_abs_diff": 0}
    target = find_target(str(become.path), become.path.parent)
    write_card(target, tmp_path, {**numbers, "max_abs_logit": 1})
    said = f" in {LAST - DONE} steps of 128 after the import of step {DONE} from `ckpt.pt`, "
    assert said in (tmp_path / "README.md").read_text()


def test_without_an_optimizer_its_moments_begin_at_zero(origin, become, tmp_path, capsys):
    take(become, write(tmp_path / "ckpt.pt", nano(origin, optimizer=None)))
    assert "none in the file: its moments begin at zero" in capsys.readouterr().out
    assert become.hashes(DONE)[0] == origin.hashes(DONE)[0]
    become.train("--resume=latest")
    assert become.status()["state"] == "completed"
    # Without nanoGPT's count: build-nanogpt saves before the update `step`, the older program after it.
    for more in ({"step": DONE, "config": NANO}, {"step": DONE - 1, "args": NANO}):
        content = nano(origin, optimizer=None, iter_num=None, model_args=None, **more)
        assert read_foreign(write(tmp_path / "model.pt", content), trust=False).step == DONE


def older(origin: Run, monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """Write a file as the older program does: its settings are an object of its main module."""
    monkeypatch.setattr(GPTConfig, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    numpy_state = np.random.RandomState(3).get_state()
    content = {
        **{"step": DONE - 1, "epoch": 0, "model": model_of(origin)},
        **{"optimizer": optimizer_of(origin), "val_loss": float("inf")},
        "rng_state": {"numpy": numpy_state, "torch": torch.get_rng_state()},
        "dataloader_state": {"train_curr_shard": 0, "train_curr_pos": 640},
        "args": {"num_layers": 2, "path": Path("checkpoints")},
        "config": GPTConfig(),
        "checkpoint_type": "regular",
    }
    write(path, content)
    monkeypatch.delattr(sys.modules["__main__"], "GPTConfig")
    return path


def test_the_older_programs_file_needs_trust(origin, become, tmp_path, monkeypatch):
    file = older(origin, monkeypatch, tmp_path / "latest.pt")
    with pytest.raises(CheckpointError, match=r"pickled objects, which can run code.*--trust"):
        take(become, file)
    assert not become.path.exists()
    take(become, file, "--trust")
    assert become.hashes(DONE) == origin.hashes(DONE)
    become.train("--resume=latest")
    assert become.status()["state"] == "completed"


class Hostile:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sentinel),)


@pytest.mark.parametrize("trust", [(), ("--trust",)])
def test_a_hostile_file_runs_nothing_even_if_it_is_trusted(trust, origin, become, tmp_path):
    sentinel = tmp_path / "was_here"
    file = write(tmp_path / "ckpt.pt", nano(origin, config=Hostile(sentinel)))
    with pytest.raises(CheckpointError):
        take(become, file, *trust)
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(Hostile(sentinel)))
    assert sentinel.exists(), "the trap works"


def test_a_compressed_file_is_not_unpacked_and_a_damaged_archive_is_named(origin, become, tmp_path):
    """torch.save never compresses; two megabytes of such a file can be two gigabytes of zeros."""
    plain, packed = write(tmp_path / "ckpt.pt", nano(origin)), tmp_path / "packed.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for name in source.namelist():
            to.writestr(name, source.read(name))
    with pytest.raises(CheckpointError):
        take(become, packed)
    content = plain.read_bytes()
    plain.write_bytes(content.replace(b"PK\x01\x02", b"PK\x01\x03", 1))  # of the list of its files
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: not a checkpoint that torch\.save"):
        take(become, plain)


def with_tensor(name: str, value: torch.Tensor | None) -> Callable[[Run], dict[str, Any]]:
    def change(origin: Run) -> dict[str, Any]:
        model = model_of(origin) | {name: value}
        return {"model": {key: tensor for key, tensor in model.items() if tensor is not None}}

    return change


MISFITS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "no weights": lambda o: {"model": None},
    "no tensor": with_tensor("transformer.ln_f.weight", None),
    "no bias of one norm": with_tensor("transformer.h.1.ln_1.bias", None),
    "unknown tensor": with_tensor("transformer.h.0.moe.weight", torch.ones(2)),
    "another shape": with_tensor("transformer.ln_f.bias", torch.ones(31)),
    "not finite": with_tensor("transformer.ln_f.bias", torch.full((32,), torch.nan)),
    "no tied head": with_tensor("lm_head.weight", torch.ones(256, 32)),
    "a view of one": with_tensor("transformer.wte.weight", torch.ones(1).expand(10**9, 32)),
    "no sizes": lambda o: {"model_args": None},
    "five heads": lambda o: {"model_args": NANO | {"n_head": 5}},
    "no step": lambda o: {"optimizer": None, "iter_num": None},
    "other groups": lambda o: {"optimizer": {"state": {0: {}}, "param_groups": []}},
    "no tensors": lambda o: {"model": {}},
    "sparse": with_tensor("transformer.ln_f.bias", torch.ones(32).to_sparse()),
    "without values": with_tensor("transformer.ln_f.bias", torch.ones(32, device="meta")),
    "complex": with_tensor("transformer.ln_f.bias", torch.ones(32, dtype=torch.complex64)),
    "no heads": lambda o: {"model_args": NANO | {"n_head": 0}},
    "a step before the first": lambda o: {"iter_num": -1},
    "steps that are no number": lambda o: {"optimizer": with_steps(o, torch.tensor(torch.nan))},
    "endless steps": lambda o: {"optimizer": with_steps(o, torch.tensor(torch.inf))},
}


def with_steps(origin: Run, steps: torch.Tensor) -> dict[str, Any]:
    optimizer = optimizer_of(origin)
    for values in optimizer["state"].values():
        values["step"] = steps
    return optimizer


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_named(case, origin, become, tmp_path, wording):
    with pytest.raises(CheckpointError, check=wording):
        take(become, write(tmp_path / "ckpt.pt", nano(origin, **MISFITS[case](origin))))
    assert not become.path.exists()


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "_orig_mod.module."])
def test_wrappers_come_off_in_any_order(prefix, origin, tmp_path):
    """torch.compile of DDP, or DDP of what torch.compile returned."""
    file = write(tmp_path / "ckpt.pt", nano(origin, model=model_of(origin, prefix)))
    weights = read_foreign(file, trust=False).weights
    for name, tensor in model_of(origin).items():
        assert our(name) not in weights or torch.equal(weights[our(name)], tensor)
    assert len(weights) == len(their_names())


def test_a_swapped_moment_is_rejected(origin, become, tmp_path):
    optimizer = optimizer_of(origin)
    optimizer["state"][0], optimizer["state"][1] = optimizer["state"][1], optimizer["state"][0]
    with pytest.raises(CheckpointError, match=r"does not fit wte\.weight"):
        take(become, write(tmp_path / "ckpt.pt", nano(origin, optimizer=optimizer)))


def test_the_run_it_becomes_must_fit_and_is_written_in_full(origin, become, tmp_path, monkeypatch):
    file = write(tmp_path / "ckpt.pt", nano(origin))
    with pytest.raises(ConfigError, match=r"--n_layer 3: ckpt\.pt has 2"):
        take(become, file, "--n_layer=3")
    with pytest.raises(ConfigError, match="is of step 4, the run would have 4"):
        take(become, file, "--max_steps=4")
    monkeypatch.setenv("FAULT", "checkpoint.after_rename:enospc@4")
    with pytest.raises(OSError, match="No space left"):
        take(become, file)
    assert not become.path.exists()
    monkeypatch.delenv("FAULT")
    take(become, file)
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        take(become, file)


def test_the_command_rejects_in_one_line(become, tmp_path):
    (tmp_path / "notes.pt").write_text("no checkpoint")
    for flag, expected in (
        ("--import_checkpoint=notes.pt", "notes.pt"),
        ("--import_checkpoint=none.pt", "error: none.pt: no such file"),
        ("--trust", "--trust goes with --import_checkpoint"),
    ):
        done = launch.call(launch.TRAIN, *become.flags, flag, folder=tmp_path)
        assert expected in launch.rejected(done)
