"""Evaluating, scoring and sampling between steps never makes the training step compile again."""

from __future__ import annotations

import pytest

import launch
from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from tiny import flags_of, write_items, write_shards

WORKER = launch.WORKERS / "count_compiles.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layers", "evaluation"),
    [(1, 1, "eager"), (2, 1, "compiled"), (2, REGIONS_FROM_LAYERS, "eager")],
)
def test_the_step_is_compiled_once(world, layers, evaluation, tmp_path):
    """So is a compiled evaluation: before the first step, for one shape, though its last batch is not full.

    A deep model's step is three graphs: embeddings, the block, and the loss.
    """
    write_shards(tmp_path / "data", train=(2000,), val=(650,))
    write_items(tmp_path / "items.jsonl", 5)
    flags = [
        *flags_of(tmp_path, "run", f"--n_layer={layers}", "--max_steps=6", "--compile=on"),
        *("--sample_freq=2", "--sample_tokens=4"),
    ]
    extra = {"COMPILE_EVALUATION": "1"} if evaluation == "compiled" else {}
    done = launch.train_in_forks(flags, world=world, program=WORKER, **extra)
    assert done.returncode == 0, done.stderr
    for kind in ("eval", "hellaswag", "sample"):
        assert {event["step"] for event in launch.events(tmp_path / "runs" / "run", kind)} >= {
            2,
            4,
            6,
        }
    counts = [line for line in done.stdout.splitlines() if line.startswith("graphs")]
    graphs = (3 if layers >= REGIONS_FROM_LAYERS else 1) + (evaluation == "compiled")
    assert counts == [f"graphs after step 1: {graphs}, at the end: {graphs}"] * world
