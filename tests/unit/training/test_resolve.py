"""A start is resolved once: one training order, one reading of the checkpoint."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gpt2lab.checkpoint import manifest
from gpt2lab.config.settings import record
from gpt2lab.data.order import Order
from gpt2lab.training.resolve import resolve
from tiny import parse, pretrain


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Record the first argument of every call of a function from here on."""
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_a_training_run_builds_one_order_of_the_training_windows(tiny_flags, monkeypatch):
    orders = count_calls(monkeypatch, Order, "__init__")
    pretrain(parse([*tiny_flags, "--max_steps=1"]))
    assert len(orders) == 3, "two of validation: the start checks it, and the loss is opened"


def test_a_resume_with_a_preset_hashes_the_checkpoint_once(tiny_flags, tmp_path, monkeypatch):
    pretrain(parse([*tiny_flags, "--max_steps=4", "--stop_after_steps=2"]))
    hashed = count_calls(monkeypatch, manifest, "verify")
    command = parse([*tiny_flags, "--resume=latest", "--preset=1x4090"])
    start = resolve(command, world_size=1, set_aside=False)
    assert start.checkpoint is not None
    assert hashed == [tmp_path / "runs" / "tiny" / "step_00000002"]


def test_a_warm_up_that_follows_from_a_files_epochs_follows_another_length(tiny_data, tmp_path):
    """As where the file's length is in steps; one that somebody chose stays, and so does that of the same length."""
    flags = ["--context_length=16", "--total_batch_size=64", "--mini_batch_size=2"]
    flags += [f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path}", "--vocab_size=256"]

    def warmup_of(*more: str) -> int | None:
        start = resolve(parse([*flags, *more]), world_size=1, set_aside=False)
        (tmp_path / "config.json").write_text(json.dumps(record(start.config, start.chosen)))
        return start.config.optim.warmup_steps

    file, epochs = f"--config={tmp_path / 'config.json'}", "--num_epochs=2"
    assert warmup_of(epochs) == 9
    assert warmup_of(file) == 9
    assert warmup_of(file, "--max_steps=40") == 4
    assert warmup_of(epochs) == 9
    assert warmup_of(file, "--num_epochs=1") == 4
    assert warmup_of(epochs, "--warmup_steps=7") == 7
    assert warmup_of(file, "--max_steps=40") == 7
    # How long an earlier version's run of epochs was only its data tell: its warm-up stays.
    assert warmup_of(epochs) == 9
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["chosen"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert warmup_of(file, "--max_steps=40") == 9


def _chosen(tiny_flags: list[str], *flags: str) -> tuple[Any, ...]:
    """Return batch, rates, and whether they suit the length, of a start on the tiny data."""
    data = next(flag for flag in tiny_flags if flag.startswith("--data_dir"))
    start = resolve(parse([data, "--device=cpu", *flags]), world_size=1, set_aside=False)
    optim = start.config.optim
    batch = start.config.batch.total_batch_size
    return batch, optim.max_lr, optim.muon_lr, start.plan.suits_length


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("modern-micro --max_tokens=200k", (1024, 4.5e-2, 1e-2, True)),
        ("modern-micro --max_tokens=1250k", (2048, 2.2e-2, 6.2e-3, True)),
        ("modern-micro --max_tokens=50M", (4096, 1.1e-2, 3.9e-3, True)),
        ("gpt2-micro --max_tokens=250k", (1024, 2e-3, None, True)),
        ("modern-micro --max_tokens=200k --mini_batch_size=8", (2048, 4.5e-2, 1e-2, True)),
        ("modern-micro --max_tokens=200k --max_lr=0.01", (1024, 0.01, 1e-2, True)),
        ("modern-micro --max_tokens=200k --total_batch_size=2048", (2048, 4.5e-2, 1e-2, True)),
        ("modern-micro --max_tokens=250k --optimizer=adamw", (1024, 2e-3, None, True)),
        ("gpt2-micro --max_tokens=250k --dropout=0.1", (2048, 2e-3, None, True)),
        (
            "modern-micro --max_tokens=200k --fit_schedule --max_hours=1",
            (4096, 3.2e-2, 1e-2, False),
        ),
        ("modern-micro --max_steps=4", (4096, 3.2e-2, 1e-2, False)),
        ("gpt2-nano --max_tokens=200k", (4096, 3e-3, None, False)),
    ],
)
def test_batch_and_rates_suit_the_length_where_nobody_chose_them(tiny_flags, flags, expected):
    assert _chosen(tiny_flags, *f"--model={flags}".split()) == expected
