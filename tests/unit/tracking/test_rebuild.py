"""gpt2lab runs rebuild-tensorboard: the same points as a run's own mirror, and never while the run goes on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2lab.runs.folder import RunFolder
from launch import ask, steps
from tiny import parse, pretrain


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return {tag: its (step, value)}; of texts, the steps."""
    read = EventAccumulator(str(folder))
    read.Reload()
    tags = read.Tags()
    found = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags["scalars"]}
    found |= {tag: [(e.step, 0.0) for e in read.Tensors(tag)] for tag in tags["tensors"]}
    return {tag: values for tag, values in found.items() if values}  # a resume empties some


@pytest.fixture
def run_dir(tmp_path: Path, tiny_flags: list[str]) -> Path:
    """Return a run of four steps that was stopped after three, went back to step 2, and was mirrored all along."""
    flags = [*tiny_flags, "--vocab_size=50304", "--sample_tokens=2", "--use_tensorboard"]
    flags += ["--max_steps=4", "--checkpoint_freq=1", "--eval_freq=2", "--sample_freq=2"]
    pretrain(parse([*flags, "--stop_after_steps=3"]))
    pretrain(parse([*flags, "--resume=2"]))
    return tmp_path / "runs" / "tiny"


def test_the_mirror_is_rebuilt_point_for_point_with_the_times_of_the_events(
    run_dir: Path, tmp_path: Path
) -> None:
    own = points(run_dir / "tensorboard")
    assert [step for step, _ in own["Loss/train"]] == [1, 2, 3, 4]
    assert "tensorboard: 9 events" in ask("runs rebuild-tensorboard", "tiny", folder=tmp_path)
    assert points(run_dir / "tensorboard") == own
    (file,) = (run_dir / "tensorboard").iterdir()
    read = EventAccumulator(str(file))
    read.Reload()
    assert [e.wall_time for e in read.Scalars("Loss/train")] == [
        event["time"] for event in steps(run_dir).values()
    ]
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]


def test_a_run_that_goes_on_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    before = sorted((run_dir / "tensorboard").iterdir())
    with contextlib.closing(RunFolder(run_dir)):
        code, line = ask("runs rebuild-tensorboard", "tiny", folder=tmp_path)
    assert (code, "in use by process" in line) == (2, True)
    assert sorted((run_dir / "tensorboard").iterdir()) == before


def test_what_is_not_a_run_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    assert "no run of this name" in ask("runs rebuild-tensorboard", "nothing", folder=tmp_path)[1]
    assert "not the folder of a run" in ask("runs rebuild-tensorboard", "empty", folder=tmp_path)[1]
    assert list((tmp_path / "runs" / "empty").iterdir()) == []
