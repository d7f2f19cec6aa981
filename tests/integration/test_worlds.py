"""The same tokens and the same curve on any number of processes and any cut into micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch
from tiny import parse, pretrain

STEPS = 50
RANKS_AGREE = launch.WORKERS / "ranks_agree.py"


@pytest.fixture(scope="module")
def reference(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one process that takes the whole batch of 8 sequences at once."""
    return _run(tiny_data, tmp_path_factory.mktemp("reference"), world=1, mini_batch_size=8)


def _flags(data: Path, folder: Path, mini_batch_size: int) -> list[str]:
    return [
        *("--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16", "--vocab_size=256"),
        *("--total_batch_size=128", f"--mini_batch_size={mini_batch_size}", f"--max_steps={STEPS}"),
        *("--max_lr=6e-4", "--device=cpu", "--dtype=fp32", "--compile=off", "--val_tokens=320"),
        *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=run"),
    ]


def _run(data: Path, folder: Path, *, world: int, mini_batch_size: int) -> Path:
    flags = _flags(data, folder, mini_batch_size)
    if world == 1:
        pretrain(parse(flags))
        return folder / "run"
    done = launch.train_in_forks(flags, world=world, program=RANKS_AGREE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"compared {STEPS} steps") == world
    return folder / "run"


@pytest.mark.slow
def test_compiled_processes_agree_with_an_uncompiled_one(
    reference: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The path of a 4-GPU run: compile, DDP and accumulation together."""
    flags = [flag for flag in _flags(tiny_data, tmp_path, 1) if flag != "--compile=off"]
    done = launch.train_in_forks([*flags, "--compile=on"], world=2, program=RANKS_AGREE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"compared {STEPS} steps") == 2
    found, expected = launch.steps(tmp_path / "run"), launch.steps(reference)
    for step in range(1, STEPS + 1):
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("world", "mini_batch_size"),
    [(1, 1), (2, 1), *(pytest.param(*cut, marks=pytest.mark.slow) for cut in [(2, 4), (4, 2)])],
)
def test_losses_do_not_depend_on_processes_or_accumulation(
    world: int, mini_batch_size: int, reference: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Accumulation 8 and 4 (slow: 1, 1), against 1; ranks' parameters are compared bit by bit on the way."""
    run = _run(tiny_data, tmp_path, world=world, mini_batch_size=mini_batch_size)
    expected, found = launch.steps(reference), launch.steps(run)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step in found:
        assert found[step]["batch_hash"] == expected[step]["batch_hash"], "other tokens"
        # 1e-5 relative: the order of fp32 sums is all that may differ (design, section 3).
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
    assert launch.losses(run)[STEPS] != launch.losses(run)[1]
    evals = [launch.events(folder, "eval")[-1]["val_loss"] for folder in (run, reference)]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
