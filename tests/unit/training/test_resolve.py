"""A start is resolved once: one training order, one reading of the checkpoint."""

import json
from unittest.mock import patch

import pytest

from gpt2lab.checkpoint import manifest
from gpt2lab.config.settings import record
from gpt2lab.data.order import Order
from gpt2lab.training.resolve import resolve
from tiny import parse, pretrain


def test_a_training_run_builds_one_order_of_the_training_windows(tiny_flags):
    with patch.object(Order, "__init__", autospec=True, side_effect=Order.__init__) as begin:
        pretrain(parse([*tiny_flags, "--max_steps=1"]))
    assert begin.call_count == 3, "two of validation: the start checks it, and the loss is opened"


def test_a_resume_with_a_preset_hashes_the_checkpoint_once(tiny_flags):
    pretrain(parse([*tiny_flags, "--max_steps=4", "--stop_after_steps=2"]))
    command = parse([*tiny_flags, "--resume=latest", "--preset=1x4090"])
    with patch.object(manifest, "verify", wraps=manifest.verify) as verify:
        start = resolve(command, world_size=1, set_aside=False)
    assert start.checkpoint is not None
    assert [one.args[0].name for one in verify.call_args_list] == ["step_00000002"]


def test_a_warm_up_that_follows_from_a_files_epochs_follows_another_length(tiny_data, tmp_path):
    """As where the file's length is in steps; one that somebody chose stays, and so does that of the same length."""
    flags = ["--context_length=16", "--total_batch_size=64", "--mini_batch_size=2"]
    flags += [f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path}", "--vocab_size=256"]

    def warmup_of(*more: str) -> int | None:
        start = resolve(parse([*flags, *more]), world_size=1, set_aside=False)
        (tmp_path / "config.json").write_text(json.dumps(record(start.config, start.chosen)))
        return start.config.optim.warmup_steps

    file, epochs = f"--config={tmp_path / 'config.json'}", "--num_epochs=2"
    assert (warmup_of(epochs), warmup_of(file)) == (9, 9)
    assert warmup_of(file, "--max_steps=40") == 4
    assert (warmup_of(epochs), warmup_of(file, "--num_epochs=1")) == (9, 4)
    assert (warmup_of(epochs, "--warmup_steps=7"), warmup_of(file, "--max_steps=40")) == (7, 7)
    # How long an earlier version's run of epochs was only its data tell: its warm-up stays.
    assert warmup_of(epochs) == 9
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["chosen"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert warmup_of(file, "--max_steps=40") == 9


MODERN = (4096, 3.2e-2, 1e-2, False)  # its own


@pytest.mark.parametrize(
    ("flags", "expected"),  # batch, rates, and whether they suit the length
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
        ("modern-micro --max_tokens=200k --fit_schedule --max_hours=1", MODERN),
        ("modern-micro --max_steps=4", MODERN),
        ("gpt2-nano --max_tokens=200k", (4096, 3e-3, None, False)),
    ],
)
def test_batch_and_rates_suit_the_length_where_nobody_chose_them(tiny_data, flags, expected):
    words = [f"--data_dir={tiny_data}", "--device=cpu", *f"--model={flags}".split()]
    start = resolve(parse(words), world_size=1, set_aside=False)
    batch, optim = start.config.batch.total_batch_size, start.config.optim
    assert (batch, optim.max_lr, optim.muon_lr, start.plan.suits_length) == expected
