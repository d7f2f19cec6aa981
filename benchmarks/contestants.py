"""The trainers that are compared: ours, and others' own scripts in copies of their checkouts. No torch.

Each does the same work: shape, tokens a step, data. What differs by nature: nanoGPT has erf GELU and draws windows at
random, Hugging Face predicts T - 1 targets, litgpt has rotary instead of learned positions.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.sizes import Size, Variant
from gpt2lab import fmt, paths
from gpt2lab.errors import ConfigError

Device = Literal["cpu", "cuda"]
PEERS = ("nanogpt", "predecessor", "litgpt", "hf")
_HERE = Path(__file__).parent
_MANY = 1000  # steps that a run is told to last: what is timed is the beginning of a long run


@dataclass(frozen=True)
class Step:
    """One optimizer step as the trainer itself reports it."""

    seconds: float
    loss: float  # nats/token
    data_seconds: float | None = (
        None  # of these, spent on waiting for the batch; None where nobody tells
    )


@dataclass(frozen=True)
class Place:
    """Where a contestant runs, and on what."""

    folder: Path  # its own, empty
    data: Path  # token_stream.write_formats
    tiktoken_cache: Path
    device: Device

    @property
    def output(self) -> Path:
        """What the contestant prints."""
        return self.folder / "output.txt"


@dataclass(frozen=True)
class Contestant:
    """A trainer, ready to start."""

    name: str
    program: tuple[str, ...]  # script and flags
    place: Place
    read: Callable[[Place], list[Step]]  # the steps that it has reported so far
    size: Size
    environment: dict[str, str] = field(default_factory=dict)
    precision: Literal["fp32", "bf16"] = "bf16"  # of its matrix products: which ceiling is its own


def ours(
    place: Place,
    size: Size,
    *,
    dtype: Literal["auto", "fp32", "bf16"],
    variant: tuple[str, Variant] | None = None,
) -> Contestant:
    """Return our trainer with its own defaults for everything that is not work, or with a variant of them."""
    name, changed = variant or ("ours" if dtype == "auto" else f"ours {dtype}", Variant())
    size = changed.cut(size)
    flags = {
        **{name: getattr(size, name) for name in ("n_layer", "n_head", "n_embd")},
        "vocab_size": size.our_vocab_size,
        "context_length": size.context_length,
        "mini_batch_size": size.mini_batch_size,
        "total_batch_size": size.tokens,
        "max_steps": _MANY,
        "warmup_steps": 10,
        "val_tokens": size.context_length,
        "eval_freq": _MANY,
        "sample_freq": _MANY,
        "checkpoint_freq": _MANY,
        "data_dir": place.data / "shards",
        "checkpoint_dir": place.folder,
        "run_name": "run",
        "device": place.device,
        "dtype": dtype,
        **changed.flags,
    }
    return Contestant(
        name=name,
        program=(str(paths.REPOSITORY / "src" / "train.py"), *_as_flags(flags)),
        place=place,
        read=_our_steps,
        size=size,
        environment=changed.environment,
        precision="fp32" if dtype == "fp32" else "bf16",
    )


def peer(name: str, checkout: Path | None, place: Place, size: Size) -> Contestant:
    """Return the peer of that name, in a copy of its checkout made ready to run.

    Raises: ConfigError if the checkout is not that peer's, or has changed where it must be adapted.
    """
    if name == "hf":
        return _hf(place, size)
    assert checkout is not None
    return {"nanogpt": _nanogpt, "predecessor": _predecessor, "litgpt": _litgpt}[name](
        checkout, place, size
    )


# What a checkout must hold to be that peer: a file, and a text in it.
_MARKS = {
    "nanogpt": ("train.py", "estimate_mfu(batch_size * gradient_accumulation_steps, dt)"),
    "predecessor": ("src/train_improved.py", "class CheckpointManager"),
    "litgpt": ("litgpt/pretrain.py", "def setup("),
}


def parse_peer(text: str) -> tuple[str, Path | None]:
    """Read `--peer NAME=PATH` (or `hf`, which is the installed transformers) and check that the checkout is that peer.

    Raises: ConfigError.
    """
    name, _, path = text.partition("=")
    if name not in PEERS:
        raise ConfigError(f"--peer {text}: no such peer; known: {', '.join(PEERS)}")
    if name == "hf":
        if path:
            raise ConfigError(
                f"--peer {text}: hf is the installed transformers, without a path: --peer hf"
            )
        return name, None
    if not path:
        raise ConfigError(f"--peer {name}: give its checkout, --peer {name}=PATH")
    checkout = paths.from_working_directory(Path(path))
    if not checkout.is_dir():
        raise ConfigError(f"--peer {name}: no folder {checkout}")
    file, mark = _MARKS[name]
    if not (checkout / file).is_file():
        raise ConfigError(f"--peer {name}: {checkout} is not a checkout of it: no {file} in it")
    if mark not in (checkout / file).read_text(errors="replace"):
        raise ConfigError(f"--peer {name}: {checkout / file} is not {name}'s, or has changed")
    return name, checkout


def _nanogpt(checkout: Path, place: Place, size: Size) -> Contestant:
    copy = place.folder / "nanoGPT"
    shutil.copytree(
        checkout, copy, ignore=shutil.ignore_patterns("assets", "*.ipynb", ".git", "out*", "*.bin")
    )
    data = copy / "data" / "bench"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        os.symlink(place.data / "tokens.bin", data / f"{split}.bin")
    with open(data / "meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": size.vocab_size}, file)
    flags = {
        "dataset": "bench",
        "device": place.device,
        "compile": place.device == "cuda",  # its README: not on a CPU
        "eval_iters": 1,
        "eval_interval": 100 * _MANY,
        "log_interval": 1,
        "block_size": size.context_length,
        "batch_size": size.mini_batch_size,
        "gradient_accumulation_steps": size.accumulation,
        **{name: getattr(size, name) for name in ("n_layer", "n_head", "n_embd")},
        "bias": True,
        "max_iters": _MANY,
        "lr_decay_iters": _MANY,
        "warmup_iters": 10,
    }
    return Contestant(
        name="nanogpt",
        program=(str(copy / "train.py"), *_as_flags(flags)),
        place=place,
        read=_lines(r"iter \d+: loss (?P<loss>[\d.]+), time (?P<ms>[\d.]+)ms"),
        size=size,
        precision="fp32" if place.device == "cpu" else "bf16",
    )


def _predecessor(checkout: Path, place: Place, size: Size) -> Contestant:
    copy = place.folder / "predecessor"
    shutil.copytree(checkout / "src", copy / "src")
    script = copy / "src" / "train_improved.py"
    source = _adapted(
        script.read_text(), "vocab_size=50304", f"vocab_size={size.vocab_size}", script
    )
    script.write_text(source)
    data = copy / "data"
    data.mkdir()
    os.symlink(place.data / "shards", data / "edu_fineweb10B")
    flags = {
        "total_batch_size": size.tokens,
        "mini_batch_size": size.mini_batch_size,
        "context_length": size.context_length,
        "num_layers": size.n_layer,
        "embd_size": size.n_embd,
        "num_heads": size.n_head,
        "eval_freq": 100 * _MANY,
        "checkpoint_freq": 100 * _MANY,
        "steps_per_epoch": _MANY,
        "warmup_steps": 10,
    }
    return Contestant(
        name="predecessor",
        program=(str(script), *(word for flag in flags.items() for word in _typed(*flag))),
        place=place,
        read=_lines(r"loss: (?P<loss>[\d.]+) .* dt: (?P<ms>[\d.]+)ms"),
        size=size,
        environment={"TIKTOKEN_CACHE_DIR": str(place.tiktoken_cache)},
    )


def _litgpt(checkout: Path, place: Place, size: Size) -> Contestant:
    return Contestant(
        name="litgpt",
        program=(str(_HERE / "litgpt_setup.py"), str(place.data / "tokens.bin"), *_shape(size)),
        place=place,
        read=_litgpt_steps,
        size=size,
        environment={"PYTHONPATH": str(checkout)},
    )


def _hf(place: Place, size: Size) -> Contestant:
    return Contestant(
        name="hf",
        program=(
            *(str(_HERE / "hf_loop.py"), str(place.data / "tokens.bin")),
            *(place.device, *_shape(size)),
        ),
        place=place,
        read=_lines(r"^loss (?P<loss>[\d.]+) ms (?P<ms>[\d.]+)"),
        size=size,
        precision="fp32" if place.device == "cpu" else "bf16",
    )


def _shape(size: Size) -> list[str]:
    shape = (size.n_layer, size.n_head, size.n_embd, size.vocab_size, size.context_length)
    return [str(number) for number in (*shape, size.mini_batch_size, size.accumulation)]


def _as_flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _typed(name: str, value: object) -> tuple[str, str]:
    return f"--{name}", str(value)


def _adapted(source: str, old: str, new: str, where: Path) -> str:
    if old not in source:
        raise ConfigError(
            f"{where.name} of this checkout has no {old!r} any more; the benchmark would not set its size"
        )
    return source.replace(old, new)


def _our_steps(place: Place) -> list[Step]:
    steps = _our_step_events(place)
    return [Step(e["step_seconds"], e["loss"], e["data_wait_seconds"]) for e in steps]


def _our_step_events(place: Place) -> list[dict[str, Any]]:
    path = place.folder / "run" / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["event"] == "step"]


def kernels_of(contestant: Contestant) -> dict[str, str | None]:
    """Return which kernels compute attention and loss in ours, where it has looked."""
    path = contestant.place.folder / "run" / "run.json"
    facts = json.loads(path.read_text()) if path.exists() else {"environment": {}}
    return {name: facts["environment"].get(name) for name in ("attention", "loss_kernel")}


def forecast_of(contestant: Contestant) -> dict[str, Any] | None:
    """Return what ours predicted before its first step, beside the memory that it took; None for another trainer.

    Tokens/s with their interval. Peak bytes: of tensors on a GPU, of the process on a CPU.
    """
    run = contestant.place.folder / "run"
    if not (run / "estimate.json").exists():
        return None
    predicted = json.loads((run / "estimate.json").read_text())
    memory, rate = predicted["memory"], predicted["throughput"]
    on_gpu = contestant.place.device == "cuda"
    return {
        "tokens_per_second": {name: rate[name] for name in ("value", "low", "high")},
        "source": rate["source"],
        "peak_bytes": memory["total"] - (memory["context"] if on_gpu else 0),
        "actual_peak_bytes": max(
            e["peak_memory_bytes"] for e in _our_step_events(contestant.place)
        ),
    }


def describe_forecast(forecast: dict[str, Any]) -> str:
    """Write it for people."""
    rate, of = forecast["tokens_per_second"], forecast["source"]
    peak, actual = (fmt.num_bytes(forecast[f"{x}peak_bytes"]) for x in ("", "actual_"))
    return (
        f"predicted {rate['value']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f}, {of}); "
        f"peak memory {actual}, predicted {peak}"
    )


def _lines(pattern: str) -> Callable[[Place], list[Step]]:
    """Return a reader of one step per printed line."""
    compiled = re.compile(pattern)

    def read(place: Place) -> list[Step]:
        lines = place.output.read_text(errors="replace").split("\n")[:-1]
        found = [match for line in lines if (match := compiled.search(line))]
        return [Step(float(m["ms"]) / 1000, float(m["loss"])) for m in found]

    return read


def _litgpt_steps(place: Place) -> list[Step]:
    """Add up its lines, one per micro-batch, to optimizer steps, whose last line says so."""
    pattern = re.compile(
        r"loss train: (?P<loss>[\d.]+),.* iter time: (?P<ms>[\d.]+) ms(?P<step> \(step\))?"
    )
    steps, seconds = [], 0.0
    for line in place.output.read_text(errors="replace").split("\n")[:-1]:
        match = pattern.search(line)
        if match:
            seconds += float(match["ms"]) / 1000
            if match["step"]:
                steps.append(Step(seconds, float(match["loss"])))
                seconds = 0.0
    return steps
