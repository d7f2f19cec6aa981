"""`--reduce exact`: one order of summation, so the same bits on any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch

STEPS = 20


def run(data: Path, folder: Path, world: int, *more: str) -> Path:
    flags = [
        *("--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16", "--vocab_size=256"),
        *("--total_batch_size=192", "--mini_batch_size=1", "--val_tokens=320", "--eval_freq=0"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", f"--max_steps={STEPS}"),
        *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=run", *more),
    ]
    done = launch.train_in_forks(flags, world=world)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def alone(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the plain run of one process: exact reduction promises its very bits."""
    return run(tiny_data, tmp_path_factory.mktemp("alone"), 1)


def same_bits(one: Path, other: Path) -> None:
    assert launch.losses(one) == launch.losses(other)
    assert launch.parameter_hash(one, STEPS) == launch.parameter_hash(other, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_any_number_of_processes_gives_the_bits_of_one(
    world: int, alone: Path, tiny_data: Path, tmp_path: Path
) -> None:
    same_bits(run(tiny_data, tmp_path, world, "--reduce=exact", "--dropout=0"), alone)


@pytest.mark.slow
def test_row_22_elastic_resumes_keep_every_bit(
    alone: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """1 -> 2 -> 4 -> 1 processes within one run, and each resume says what it promises."""
    folder = tmp_path / "elastic"
    for world, stop in ((1, 5), (2, 10), (4, 15)):
        resume = ["--resume=latest"] if world > 1 else []
        run(tiny_data, folder, world, "--reduce=exact", f"--stop_after_steps={stop}", *resume)
    same_bits(run(tiny_data, folder, 1, "--reduce=exact", "--resume=latest"), alone)
    levels = [event["level"] for event in launch.events(folder / "run", "resume")]
    assert levels == ["bit-identical"] * 3


@pytest.mark.slow
def test_without_it_the_bits_differ(alone: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    plain = run(tiny_data, tmp_path, 2)
    assert launch.parameter_hash(plain, STEPS) != launch.parameter_hash(alone, STEPS)
