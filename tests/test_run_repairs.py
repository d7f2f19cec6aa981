"""What went wrong once in whole runs, and must not again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2lab import fmt, trainer
from gpt2lab.checkpoints import manifest
from gpt2lab.config import OptimConfig
from gpt2lab.errors import CheckpointError, GPT2LabError, NonFiniteError
from gpt2lab.flags import parse
from gpt2lab.runs import history
from gpt2lab.runs.summary import describe_run
from gpt2lab.schedule import lr_at
from gpt2lab.start import decide
from gpt2lab.train_step import StepStats
from test_run import Run


@pytest.fixture
def run(tiny_data: Path, tmp_path: Path) -> Run:
    return Run(tiny_data, tmp_path)


def test_a_refused_start_leaves_the_run_unlocked(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        run.train("--max_steps=2")
    with pytest.raises(NonFiniteError) as kept:
        run.train(
            "--resume=latest",
            "--max_steps=3",
            "--allow_change=max_steps,max_lr,min_lr",
            "--max_lr=1e30",
            "--min_lr=1e30",
        )
    assert kept.value.__traceback__ is not None  # its frames are alive, the lock must not be
    run.train("--resume=latest", "--max_steps=4", "--allow_change=max_steps")


def test_a_non_finite_evaluation_ends_as_non_finite_and_saves_nothing_of_the_step(run: Run) -> None:
    refusal = run.refused(
        *("--max_steps=1", "--max_lr=1e20", "--min_lr=1e20", "--warmup_steps=0", "--eval_freq=1")
    )
    assert isinstance(refusal, NonFiniteError)
    assert run.status()["exit_code"] == 76
    assert run.checkpoints() == {}
    assert "validation loss" in describe_run(run.path)


def test_best_follows_the_run_back(run: Run) -> None:
    run.train("--max_steps=6", "--eval_freq=2", "--checkpoint_freq=2")
    assert run.labels()["best"] == "step_00000006"
    run.train("--resume=4", "--stop_after_steps=5")
    assert run.labels()["best"] == manifest.folder_name(run.saved_state(5)["best_step"])


def test_going_back_again_and_again_keeps_every_superseded_checkpoint(run: Run) -> None:
    run.train("--max_steps=4", "--checkpoint_freq=1", "--eval_freq=0")
    for _ in range(3):
        run.train("--resume=2")
    aside = sorted(path.parent.name for path in run.path.glob("superseded-*/step_00000003"))
    assert len(set(aside)) == 3
    assert sorted(run.checkpoints()) == [1, 2, 3, 4]


def test_typing_the_value_that_people_see_is_no_change(run: Run) -> None:
    run.train("--max_steps=4", "--stop_after_steps=2")
    run.train("--max_steps=4", "--resume=latest", "--min_lr=6e-5", "--max_lr=6e-4")
    assert run.events("resume")[0]["changes"] == {}


def test_steps_of_a_start_that_saved_nothing_are_not_the_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2lab.checkpoints.saver.Saver.rescue", lambda *args: False)
    monkeypatch.setenv("FAULT", "step:enospc@4")
    with pytest.raises(OSError, match="No space"):
        run.train("--max_steps=6", "--eval_freq=0", "--checkpoint_freq=0")
    monkeypatch.delenv("FAULT")
    run.train("--max_steps=6", "--eval_freq=0", "--checkpoint_freq=0", "--stop_after_steps=2")
    steps = history.current(history.read_events(run.path), "step")
    assert {step: event["attempt"] for step, event in steps.items()} == {1: 2, 2: 2}
    assert "at step 2 (256 tokens)" in describe_run(run.path)


def test_an_error_after_the_commit_does_not_disown_the_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "checkpoint.after_rename:enospc@2")
    run.train("--max_steps=4", "--eval_freq=2", "--checkpoint_freq=2")
    assert [event["step"] for event in run.events("checkpoint")] == [2, 4]
    assert sorted(run.checkpoints()) == [2, 4]


def test_a_superseded_checkpoint_is_not_trained_in_where_it_lies(run: Run) -> None:
    run.train("--max_steps=4", "--checkpoint_freq=1", "--eval_freq=0")
    run.train("--resume=2", "--stop_after_steps=3")
    [aside] = run.path.glob("superseded-*/step_00000004")
    before = sorted(path.name for path in aside.parent.iterdir())
    refusal = run.refused(f"--resume={aside}")
    assert isinstance(refusal, CheckpointError)
    assert "move it" in str(refusal)
    assert sorted(path.name for path in aside.parent.iterdir()) == before


def test_an_evaluation_made_due_by_a_resume_labels_the_step_that_is_on_disk(run: Run) -> None:
    run.train("--max_steps=6", "--eval_freq=3", "--checkpoint_freq=2", "--stop_after_steps=2")
    run.train("--max_steps=6", "--resume=latest", "--eval_freq=2", "--stop_after_steps=3")
    assert [event["step"] for event in run.events("eval", attempt=2)] == [2]
    assert run.labels()["best"] == "step_00000002"
    saved = [(event["step"], event["kind"]) for event in run.events("checkpoint", attempt=2)]
    assert saved == [(3, "rolling")]


def test_a_second_process_in_the_same_run_is_refused_by_name(run: Run) -> None:
    from gpt2lab.runs.folder import RunFolder

    run.train("--max_steps=2", "--stop_after_steps=1")
    holder = RunFolder(run.path)
    refusal = run.refused("--max_steps=2", "--resume=latest")
    assert "in use by process" in str(refusal)
    holder.close()
    run.train("--max_steps=2", "--resume=latest")


def test_a_short_wsd_run_decays(run: Run) -> None:
    optim = OptimConfig(lr_schedule="wsd", wsd_decay=0.1, warmup_steps=0, min_lr=6e-5)
    assert lr_at(4, optim, max_steps=4) == pytest.approx(6e-5)
    assert lr_at(3, optim, max_steps=4) == optim.max_lr


@pytest.mark.parametrize(
    ("number", "text"), [(999_900_000, "1 GB"), (999_400, "999 kB"), (999, "999 B"), (0, "0 B")]
)
def test_sizes_round_into_the_next_unit(number: int, text: str) -> None:
    assert fmt.num_bytes(number) == text


def test_every_line_of_metrics_is_json(run: Run) -> None:
    run.train("--max_steps=3", "--eval_freq=1")
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_resume_is_judged_by_the_runs_settings_not_by_the_defaults(run: Run) -> None:
    """min_lr 1e-3 is above the default max_lr, but not above this run's."""
    more = ("--max_lr=1e-2", "--min_lr=1e-3", "--max_steps=4")
    run.train(*more, "--stop_after_steps=2")
    run.train("--resume=latest", "--min_lr=1e-3")
    assert run.status()["state"] == "completed"


def test_another_model_is_refused_as_such_wherever_one_stands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its preset names other data too, which need not exist for the refusal to be the right one."""
    run.train("--max_steps=4", "--stop_after_steps=2")
    monkeypatch.chdir(tmp_path)
    argv = [
        "--model=gpt2-mini",
        "--resume=latest",
        "--run_name=tiny",
        f"--checkpoint_dir={run.path.parent}",
    ]
    with pytest.raises(GPT2LabError, match="another architecture: n_layer 2 -> 6"):
        decide(parse(argv), world_size=1, set_aside=False)


def test_every_start_ends_with_a_report_that_says_how_to_go_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train("--max_steps=4", "--eval_freq=2", "--stop_after_steps=2")
    report = capsys.readouterr().out.split("run tiny\n")[1]
    for part in ("training loss", "validation loss", "tokens/s", "checkpoints", "--resume latest"):
        assert part in report
    assert "--allow_change" not in report
    run.train("--resume=latest", "--max_steps=4")
    report = capsys.readouterr().out.split("run tiny\n")[1]
    assert "--max_steps 8 --allow_change max_steps" in report
    assert report in (run.path / "log.txt").read_text()


def test_a_checkpoint_that_does_not_load_moves_nothing_aside(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train("--max_steps=4", "--checkpoint_freq=1", "--eval_freq=0")

    def fail(*args: object, **kwargs: object) -> None:
        raise CheckpointError("does not load")

    monkeypatch.setattr("gpt2lab.checkpoints.checkpoint.load", fail)
    assert "does not load" in str(run.refused("--resume=2"))
    assert sorted(run.checkpoints()) == [1, 2, 3, 4]


def test_a_full_device_ends_in_one_line_with_the_lever_and_the_last_step_saved(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "train_step", _full_from_step_two(trainer.train_step))
    refusal = run.refused("--max_steps=3")
    assert refusal.exit_code == 1
    assert str(refusal).startswith(
        "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. A"
    )
    assert "lower --mini_batch_size" in str(refusal)
    assert "\n" not in str(refusal)
    assert list(run.checkpoints()) == [1]
    monkeypatch.undo()
    run.train("--resume=latest", "--mini_batch_size=1")
    assert run.status()["state"] == "completed"


def _full_from_step_two(train_step: Callable[..., StepStats]) -> Callable[..., StepStats]:
    taken: list[StepStats] = []

    def step(*args: Any, **options: Any) -> StepStats:
        if taken:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ..."
            )
        taken.append(train_step(*args, **options))
        return taken[0]

    return step
