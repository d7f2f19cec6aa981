"""What a resume in the same folder allows, rejects, sets aside and labels; retention."""

import json
import math
import shutil
from unittest.mock import Mock

import numpy as np
import pytest

import launch
from gpt2lab.checkpoint import manifest
from gpt2lab.errors import CheckpointError, GPT2LabError
from gpt2lab.runs.summary import describe_run
from gpt2lab.training import resolve as resolve_module
from plain_log import current_events, read_events
from tiny import resolved
from whole_run import reseal


def test_worse_evaluation_after_a_resume_is_not_labelled_best(run):
    run.train("--max_steps=4", "--eval_freq=2")
    labels, best = run.labels(), run.saved_state(4)["best_val_loss"]
    assert labels["best"] == "step_00000004"
    changes = ["--allow_change=max_steps,max_lr,min_lr", "--max_lr=0.5", "--min_lr=0.5"]
    run.train("--max_steps=8", "--resume=latest", "--eval_freq=2", *changes)
    worse = {event["step"]: event["val_loss"] for event in run.events("eval", attempt=2)}
    assert set(worse) == {6, 8}
    assert min(worse.values()) > best, "the claim needs worse evaluations"
    assert (run.labels(), run.saved_state(8)["best_val_loss"]) == (labels, best)
    assert run.saved_state(8)["best_step"] == 4
    assert not any(event["labels"] for event in run.events("checkpoint", attempt=2))


def test_changed_rate_is_rejected_until_allowed_and_then_recorded(run, tmp_path, monkeypatch):
    run.train("--max_steps=6", "--stop_after_steps=2")
    before = run.listing()
    rejection = run.rejected("--resume=latest", "--max_lr=1e-3")
    assert rejection.exit_code == 2
    assert "max_lr 0.0006 -> 0.001" in str(rejection)
    assert "--allow_change max_lr" in str(rejection)
    # Another model is rejected as such: its preset names other data too, which need not exist for that.
    monkeypatch.chdir(tmp_path)
    argv = ["--model=gpt2-mini", "--resume=latest", "--run_name=tiny"]
    argv += [f"--checkpoint_dir={run.path.parent}"]
    with pytest.raises(GPT2LabError, match="another architecture: n_layer 2 -> 6"):
        resolved(argv)
    assert run.listing() == before
    run.train("--resume=latest", "--max_lr=1e-3", "--allow_change=max_lr")
    (resume,) = run.events("resume")
    changes = {"max_lr": [6e-4, 1e-3], "min_lr": pytest.approx([6e-5, 1e-4])}
    assert (resume["level"], resume["changes"]["max_lr"]) == ("changed", [6e-4, 1e-3])
    assert run.saved_state(6)["history"] == [{"step": 2, "attempt": 2, "changes": changes}]
    assert run.checkpoints()[6].manifest["config"]["max_lr"] == 1e-3
    expected = 1e-4 + (1e-3 - 1e-4) * (1 + math.cos(math.pi * 3 / 6)) / 2
    assert run.events("step", attempt=2)[0]["lr"] == pytest.approx(expected)


def test_a_floor_that_was_typed_stays_where_it_is(run):
    run.train("--max_steps=4", "--stop_after_steps=2", "--min_lr=3e-5")
    run.train("--resume=latest", "--max_steps=4", "--max_lr=1e-3", "--allow_change=max_lr")
    assert run.checkpoints()[4].manifest["config"]["min_lr"] == 3e-5
    longer = ("--resume=latest", "--max_steps=6", "--max_lr=2e-3")
    longer += ("--allow_change=max_steps,max_lr",)
    assert "min_lr" in str(run.rejected(*longer, "--min_lr=4e-5")), "it does not follow"


def test_muon_logs_and_tells_both_learning_rates(run, capsys):
    run.train("--max_steps=3", "--optimizer=muon", "--max_lr=1e-3", "--muon_lr=5e-3")
    steps = run.events("step")
    assert [step["muon_lr"] for step in steps] == pytest.approx([5 * step["lr"] for step in steps])
    rate = steps[0]["lr"]
    assert f"| lr {rate:.1e}, muon {5 * rate:.1e} |" in capsys.readouterr().out
    more = ("--max_steps=6", "--max_lr=2e-3", "--allow_change=max_lr,max_steps")
    run.train("--resume=latest", *more)
    config = run.checkpoints()[6].manifest["config"]
    assert (config["max_lr"], config["min_lr"], config["muon_lr"]) == (2e-3, 2e-4, 5e-3)


def test_a_run_of_the_first_shuffle_goes_on_with_it(run, monkeypatch, tmp_path):
    """Runs of earlier versions have no `order_version` in their checkpoints."""
    of_old = "--shuffle=windows"
    with monkeypatch.context() as patched:
        patched.setattr(resolve_module, "VERSION", 1)
        run.train("--max_steps=6", of_old)
        straight = [event["batch_hash"] for event in run.events("step")]
        shutil.rmtree(run.path)
        run.train("--max_steps=6", of_old, "--stop_after_steps=3")
    for info in run.checkpoints().values():
        reseal(info.path, lambda content: content.pop("order_version"))
    run.train("--max_steps=6", "--resume=latest")
    assert [event["batch_hash"] for event in run.events("step")] == straight
    assert run.events("begin", attempt=2)[0]["order_version"] == 1
    assert run.checkpoints()[6].manifest["order_version"] == 1


def test_settings_that_are_free_change_without_asking(run):
    run.train("--max_steps=6", "--stop_after_steps=2")
    free = ["--eval_freq=1", "--keep_checkpoints=2", "--mini_batch_size=4", "--log_freq=1"]
    run.train("--resume=latest", *free)
    (resume,) = run.events("resume")
    changes = {"eval_freq": [250, 1], "keep_checkpoints": [10, 2], "mini_batch_size": [2, 4]}
    assert resume["changes"] == changes | {"log_freq": [10, 1]}
    assert (resume["level"], run.saved_state(6)["history"]) == ("same data", [])
    assert run.status()["state"] == "completed"


def test_resuming_an_older_step_sets_the_newer_ones_aside_and_keeps_them(run, monkeypatch):
    common = ["--max_steps=5", "--checkpoint_freq=1", "--eval_freq=0"]
    run.train(*common)
    first = run.losses()
    with monkeypatch.context() as patch:
        fail = Mock(side_effect=CheckpointError("does not load"))
        patch.setattr("gpt2lab.checkpoint.store.load", fail)
        assert "does not load" in str(run.rejected("--resume=2"))
    assert sorted(run.checkpoints()) == [1, 2, 3, 4, 5], "nothing is moved before it has loaded"
    planned = launch.call(launch.TRAIN, *run.flags, *common, "--resume=2", "--dry_run", "--json")
    assert json.loads(planned.stdout)["sets_aside"] == [f"step_{n:08d}" for n in (3, 4, 5)]
    run.train("--resume=2", "--stop_after_steps=4")
    (aside,) = run.path.glob("superseded-*")
    assert sorted(path.name for path in aside.iterdir()) == [f"step_{n:08d}" for n in (3, 4, 5)]
    for folder in aside.iterdir():
        manifest.verify(folder)
    assert list(run.checkpoints()) == [1, 2, 3, 4]
    assert "best" not in run.labels(), "the best was step 5, which is no longer of this run"
    current = current_events(read_events(run.path), "step")
    assert {n: event["attempt"] for n, event in current.items()} == {1: 1, 2: 1, 3: 2, 4: 2}
    losses = {n: event["loss"] for n, event in current.items()}
    assert losses == {n: loss for n, loss in first.items() if n <= 4}
    # A superseded checkpoint is not trained in where it lies.
    rejection = run.rejected(f"--resume={aside / 'step_00000004'}", kind=CheckpointError)
    assert "move it" in str(rejection)
    assert sorted(path.name for path in aside.iterdir()) == [f"step_{n:08d}" for n in (3, 4, 5)]
    for _ in range(2):  # and going back again and again keeps every one
        run.train("--resume=2")
    asides = sorted(path.parent.name for path in run.path.glob("superseded-*/step_00000003"))
    assert (len(set(asides)), sorted(run.checkpoints())) == (3, [1, 2, 3, 4, 5])


# 95 windows a step, of 190 in an epoch.
_TWO_STEPS_AN_EPOCH = ("--total_batch_size=1520", "--mini_batch_size=5")


def test_retention_keeps_the_last_rolling_ones_and_everything_labelled(run):
    batch = [*_TWO_STEPS_AN_EPOCH, "--num_epochs=3"]
    run.train(*batch, "--checkpoint_freq=1", "--keep_checkpoints=1", "--eval_freq=3")
    assert [event["epoch"] for event in run.events("step")] == [0, 0, 1, 1, 2, 2]
    assert [event["step"] for event in run.events("checkpoint")] == [1, 2, 3, 4, 5, 6]
    evals = {event["step"]: event["val_loss"] for event in run.events("eval")}
    assert evals[6] < evals[3], "the claim needs a second best"
    assert run.labels() == {
        **{"epoch_0001": "step_00000002", "epoch_0002": "step_00000004"},
        **{"epoch_0003": "step_00000006", "best_prev": "step_00000003", "best": "step_00000006"},
    }
    assert list(run.checkpoints()) == [2, 3, 4, 6]


def test_a_resume_with_another_batch_leaves_the_end_of_an_epoch_where_it_was(run):
    run.train(*_TWO_STEPS_AN_EPOCH, "--max_steps=4", "--stop_after_steps=3", "--eval_freq=0")
    twice = ["--resume=latest", "--total_batch_size=3040"]
    run.train(*twice, "--allow_change=total_batch_size")
    assert run.labels()["epoch_0001"] == "step_00000002"


def test_a_resume_with_another_batch_tells_the_tokens_and_epochs_of_the_end(run, capsys):
    run.train("--max_steps=6", "--stop_after_steps=4", "--eval_freq=0")
    twice = ["--resume=latest", "--total_batch_size=256", "--allow_change=total_batch_size"]
    call = launch.call(launch.TRAIN, *run.flags, *twice, "--dry_run", "--json")
    planned = json.loads(call.stdout)
    run.train(*twice)
    assert "6 steps, 1,024 tokens, 0.34 epochs" in capsys.readouterr().out
    last = run.events("step")[-1]
    assert planned["tokens"] == last["tokens"] == 1024
    assert planned["epochs"] == (last["first_sample"] + 256 // 16) / 190


def test_a_run_of_many_epochs_keeps_no_end_of_one(run):
    run.train(*_TWO_STEPS_AN_EPOCH, "--num_epochs=5", "--eval_freq=0")
    assert [event["epoch"] for event in run.events("step")][-1] == 4
    assert run.labels().keys() == {"best"}


def test_best_follows_the_run_back(run):
    run.train("--max_steps=6", "--eval_freq=2", "--checkpoint_freq=2")
    assert run.labels()["best"] == "step_00000006"
    run.train("--resume=4", "--stop_after_steps=5")
    assert run.labels()["best"] == manifest.folder_name(run.saved_state(5)["best_step"])


def test_the_best_loss_on_other_data_is_not_the_bar(run, tiny_data, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "easy").mkdir(exist_ok=True)
        np.save(tmp_path / "easy" / f"easy_{split}_000000.npy", np.full(2000, 5, np.uint16))
    common = ["--max_steps=6", "--eval_freq=2", "--max_lr=0.02"]
    run.train(*common, f"--data_dir={tmp_path / 'easy'}", "--stop_after_steps=4")
    run.train("--resume=latest", f"--data_dir={tiny_data}", "--allow_change=data,data_dir")
    easy, other = (run.events("eval", attempt=start)[-1]["val_loss"] for start in (1, 2))
    assert other > easy, "the claim needs a higher loss"
    assert (run.labels()["best"], run.saved_state(6)["best_val_loss"]) == ("step_00000006", other)
    assert f"best {other:.4f} at step 6\n" in describe_run(run.path)


def test_an_evaluation_made_due_by_a_resume_labels_the_step_that_is_on_disk(run):
    run.train("--max_steps=6", "--eval_freq=3", "--checkpoint_freq=2", "--stop_after_steps=2")
    run.train("--max_steps=6", "--resume=latest", "--eval_freq=2", "--stop_after_steps=3")
    assert [event["step"] for event in run.events("eval", attempt=2)] == [2]
    assert run.labels()["best"] == "step_00000002"
    saved = [(event["step"], event["kind"]) for event in run.events("checkpoint", attempt=2)]
    assert saved == [(3, "rolling")]


def test_a_resume_is_judged_by_the_runs_settings_not_by_the_defaults(run):
    """min_lr 1e-3 is above the default max_lr, but not above this run's."""
    more = ("--max_lr=1e-2", "--min_lr=1e-3", "--max_steps=4")
    run.train(*more, "--stop_after_steps=2")
    run.train("--resume=latest", "--min_lr=1e-3")
    assert run.status()["state"] == "completed"


def test_steps_of_a_start_that_saved_nothing_are_not_the_runs(run, monkeypatch):
    monkeypatch.setattr("gpt2lab.training.saver.Saver.rescue", lambda *args: False)
    monkeypatch.setenv("FAULT", "step:enospc@4")
    with pytest.raises(OSError, match="No space"):
        run.train("--max_steps=6", "--eval_freq=0", "--checkpoint_freq=0")
    monkeypatch.delenv("FAULT")
    run.train("--max_steps=6", "--eval_freq=0", "--checkpoint_freq=0", "--stop_after_steps=2")
    steps = current_events(read_events(run.path), "step")
    assert {step: event["attempt"] for step, event in steps.items()} == {1: 2, 2: 2}
    assert "at step 2 (256 tokens)" in describe_run(run.path)
