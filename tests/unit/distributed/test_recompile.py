"""Evaluating, scoring and sampling between steps never makes the training step compile again."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch
from tiny import write_items, write_shards

WORKER = Path(__file__).parents[2] / "workers" / "count_compiles.py"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_step_is_compiled_once(world: int, tmp_path: Path) -> None:
    write_shards(tmp_path / "data", train=(2000,), val=(650,))
    flags = [
        *("--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16", "--max_steps=6"),
        *("--total_batch_size=64", "--mini_batch_size=2", "--val_tokens=320", "--device=cpu"),
        *("--dtype=fp32", "--compile=on", "--eval_freq=2", "--sample_freq=2", "--sample_tokens=4"),
        *(f"--hellaswag_path={write_items(tmp_path / 'items.jsonl', 5)}", "--hellaswag_freq=2"),
        *(f"--data_dir={tmp_path / 'data'}", f"--checkpoint_dir={tmp_path}", "--run_name=run"),
    ]
    done = launch.train_in_forks(flags, world=world, program=WORKER)
    assert done.returncode == 0, done.stderr
    for kind in ("eval", "hellaswag", "sample"):
        assert {event["step"] for event in launch.events(tmp_path / "run", kind)} >= {2, 4, 6}
    counts = [line for line in done.stdout.splitlines() if line.startswith("graphs")]
    assert counts == ["graphs after step 1: 1, at the end: 1"] * world
