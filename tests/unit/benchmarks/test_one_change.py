"""One change at a time: without one the losses are the trainer's own, each moves them, no run is repeated."""

import json
from typing import get_args

import pytest
import torch

from benchmarks import changes
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.errors import CheckError, ConfigError
from tiny import MODERN
from whole_run import Run

TOKENS = 4 * 128


def test_each_change_moves_the_loss_none_is_the_trainers(tiny_data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(changes, "TAIL", 0.5)  # a hundredth of 4 steps is the last alone
    run = Run(tiny_data, tmp_path, **MODERN, optimizer="muon", max_tokens=TOKENS)
    run.train()
    trained = run.events("eval")[-1]["val_loss"]

    out = tmp_path / "changes.jsonl"
    names = get_args(changes.ChangeName)
    argv = [str(out), "--changes", *names, "--seeds", "1337", *run.flags]
    assert changes.main(argv) == 0
    runs = {run["change"]: run for run in map(json.loads, out.read_text().splitlines())}
    assert (list(runs), runs["none"]["val_loss"]) == (list(names), trained)
    losses = [run["val_loss"] for run in runs.values()]
    assert len(set(losses)) == len(losses)
    assert all(run["tokens"] == TOKENS for run in runs.values())

    capsys.readouterr()
    changes.main(argv)  # nothing is missing
    assert len(out.read_text().splitlines()) == len(names)
    assert "| untied_head | not decided | 1 |" in capsys.readouterr().out
    with pytest.raises(CheckError, match="holds runs of other flags; name another file"):
        changes.main([*argv, "--max_lr=0.02"])
    with pytest.raises(CheckError, match="no file of runs that this program wrote"):
        changes.main([str(run.path / "metrics.jsonl"), *run.flags])
    # A change of Muon needs it, before anything is trained.
    out = tmp_path / "others.jsonl"
    with pytest.raises(ConfigError, match="--changes normuon: needs --optimizer muon"):
        changes.main([str(out), "--changes", "soft_cap", "normuon", "--model=modern-nano"])
    assert not out.exists()


def test_a_growing_batch_takes_all_samples_once_in_their_order():
    def half(number: int) -> GlobalBatch:
        ids = torch.full((1, 2), number)
        return GlobalBatch((MicroBatch(ids, ids, 0, True),), 2, 0, number, 1, None)

    grown = list(changes.grow((half(n) for n in range(99)), 12))
    assert [width for width, _, _ in grown] == [1, 1, 1, 1, 2, 2, 4]
    micro = [[int(m.tokens[0, 0]) for m in batch.micro_batches] for _, _, batch in grown]
    assert [number for numbers in micro for number in numbers] == list(range(12))
    assert [batch.num_targets for _, _, batch in grown] == [2, 2, 2, 2, 4, 4, 8]
    assert [m.is_last for m in grown[-1][2].micro_batches] == [False, False, False, True]
