"""What a command line would do, told or written to a file without training: --dry_run and --save_config."""

import json
import shutil

import pytest

import launch
from gpt2lab.commands import dry_run
from gpt2lab.planner.auto import TrainingPlanner
from launch import TRAIN
from tiny import parse
from whole_run import Usage

RUN = ("--checkpoint_freq=2", "--eval_freq=0")


def test_a_retention_plan_that_does_not_fit_is_told_also_by_a_dry_run(run, monkeypatch, capsys):
    # Bytes a parameter x parameters x (two rolling ones, best, its predecessor, one being written).
    needed = 12 * 34_176 * 5
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, needed - 1))
    dry_run.print_plan(parse([*run.flags, "--max_steps=4", "--dry_run"]))
    told = capsys.readouterr().out
    assert f"{run.path.parent}: the checkpoints to be kept need 2.05 MB, 2.05 MB free" in told
    assert "lower --keep_checkpoints" in told
    run.train("--max_steps=4")
    [warning] = [e["message"] for e in run.events("warning") if "to be kept" in e["message"]]
    assert warning in told


@pytest.mark.parametrize(
    ("flags", "fixes"),
    [
        (["--num_epochs=4"], []),
        (["--num_epochs=5"], ["--num_epochs 4"]),
        (["--max_steps=4", "--device=cuda"], ["no GPU here"]),
        (["--max_steps=4", "--mini_batch_size=auto", "--total_batch_size=256"], ["shown with 16"]),
        (["--max_steps=4", "--n_embd=768", "--n_layer=12", "--vocab_size=50304"], ["_checkpoints"]),
        (["--max_steps=4", "--n_embd=768", "--n_layer=1", "--vocab_size=1280"], []),
    ],
)
def test_a_dry_run_tells_time_and_warns_of_epochs_and_disk(run, monkeypatch, capsys, flags, fixes):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 20 * 10**9))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dry_run.print_plan(parse([*run.flags, *flags]), planner=TrainingPlanner(), as_json=True)
    told = json.loads(capsys.readouterr().out)
    span = told["forecast_seconds"]
    assert 0 < span["low"] < span["value"] < span["high"]
    warnings = [text for text in told["warnings"] if "shards.json" not in text]
    assert all(fix in text for fix, text in zip(fixes, warnings, strict=True))


def test_checkpoints_that_a_run_holds_count_as_room(run, monkeypatch, capsys):
    run.train("--max_steps=40", "--stop_after_steps=10")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 4_000_000))
    flags = [*run.flags, "--max_steps=40", "--dry_run"]
    dry_run.print_plan(parse([*flags, "--resume=latest"]))
    assert "to be kept" not in capsys.readouterr().out, "5 of the 13 are there"
    shorter = ["--resume=latest", "--max_steps=8", "--allow_change=max_steps"]
    dry_run.print_plan(parse([*run.flags, *shorter]))
    assert "step 10 (already complete at step 8: nothing to do)" in capsys.readouterr().out
    dry_run.print_plan(parse([*flags, "--run_name=other"]))
    assert "to be kept" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.toml", "a.json"])
def test_a_saved_command_line_means_the_same(name, tmp_path):
    argv = ["--model=modern-nano", '--sample_prompt=«"\\\n', "--max_steps=7", "--min_lr=1e-05"]
    argv += ["--mini-batch-size", "auto"]
    done = launch.call(TRAIN, *argv, f"--save_config={name}", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {name}; nothing was trained. Train with: ")
    command = f"src/train.py --config {name} --mini-batch-size auto"
    assert done.stdout.endswith(f"{command}\n")
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert parse([f"--config={tmp_path / name}"]).config == parse(argv).config
    text = (tmp_path / name).read_text()
    assert "checkpoint_dir" not in text, "of this place alone"
    assert "mini_batch_size" not in text, "left open"
    again = launch.call(TRAIN, *argv, f"--save_config={name}", folder=tmp_path)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_what_cannot_be_saved_is_rejected_and_not_written(tmp_path):
    for flags in (["--save_config=a.txt"], ["--save_config=a.toml", "--n_head=5"]):
        assert launch.call(TRAIN, *flags, folder=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_verify_belongs_to_the_list_of_checkpoints(run):
    run.train("--max_steps=2")
    flags = ["--list_checkpoints", f"--checkpoint_dir={run.path.parent}", "--verify"]
    done = launch.call(TRAIN, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert launch.call(TRAIN, "--verify").returncode == 2
