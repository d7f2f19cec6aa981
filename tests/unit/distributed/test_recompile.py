"""Evaluating, scoring and sampling between steps never makes the training step compile again."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch
from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from tiny import write_items, write_shards

WORKER = Path(__file__).parents[2] / "workers" / "count_compiles.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layers", "evaluation"),
    [(1, 1, "eager"), (2, 1, "compiled"), (2, REGIONS_FROM_LAYERS, "eager")],
)
def test_the_step_is_compiled_once(
    world: int, layers: int, evaluation: str, tmp_path: Path
) -> None:
    """So is a compiled evaluation: before the first step, for one shape, though its last batch is not full.

    A deep model's step is three graphs: embeddings, the block, and the loss.
    """
    write_shards(tmp_path / "data", train=(2000,), val=(650,))
    flags = [
        *(f"--n_layer={layers}", "--n_head=2", "--n_embd=16", "--context_length=16"),
        *("--max_steps=6", "--total_batch_size=64", "--mini_batch_size=2", "--val_tokens=320"),
        *("--device=cpu", "--dtype=fp32", "--compile=on", "--eval_freq=2", "--sample_freq=2"),
        *(f"--hellaswag_path={write_items(tmp_path / 'items.jsonl', 5)}", "--hellaswag_freq=2"),
        "--sample_tokens=4",
        *(f"--data_dir={tmp_path / 'data'}", f"--checkpoint_dir={tmp_path}", "--run_name=run"),
    ]
    extra = {"COMPILE_EVALUATION": "1"} if evaluation == "compiled" else {}
    done = launch.train_in_forks(flags, world=world, program=WORKER, **extra)
    assert done.returncode == 0, done.stderr
    for kind in ("eval", "hellaswag", "sample"):
        assert {event["step"] for event in launch.events(tmp_path / "run", kind)} >= {2, 4, 6}
    counts = [line for line in done.stdout.splitlines() if line.startswith("graphs")]
    graphs = (3 if layers >= REGIONS_FROM_LAYERS else 1) + (evaluation == "compiled")
    assert counts == [f"graphs after step 1: {graphs}, at the end: {graphs}"] * world
