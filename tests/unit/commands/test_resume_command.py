"""gpt2lab runs resume-command: the command line, script or job that continues a run."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from gpt2lab.commands import resume_command
from gpt2lab.commands.resume_command import ResumeCommand, plan_continuation, write
from gpt2lab.errors import ConfigError, GPT2LabError
from launch import call


def test_the_printed_command_continues_the_run(run_dir):
    more = ["--max_steps", "14", "--allow_change", "max_steps"]
    by_name = ["r", "--checkpoint_dir", run_dir.parent]
    code, command, notes = call("runs resume-command", *by_name, *more)
    assert (code, notes) == (0, "changed: max_steps 12 -> 14\n")
    python, program, *argv = shlex.split(command)
    # python and python3 are two names in one environment's folder.
    assert Path(shutil.which(python) or "").absolute().parent == Path(sys.executable).parent
    launch.worked(call(program, *argv))
    assert max(launch.steps(run_dir)) == 14


def test_jobs_to_fill_in_are_named_and_a_run_without_a_checkpoint_is_rejected(run_dir, tmp_path):
    with pytest.raises(GPT2LabError, match="no valid checkpoint"):
        plan_continuation(ResumeCommand(str(tmp_path)))
    for output, file in (("k8s", "kubernetes"), ("sky", "skypilot")):
        with pytest.raises(ConfigError, match=f"here it is examples/{file}.yaml"):
            resume_command.main([str(run_dir), f"--output={output}"])


def test_a_checkpoint_s_folder_names_its_step_and_the_world_is_a_choice(run_dir):
    start, job = plan_continuation(ResumeCommand(str(run_dir / "step_00000008"), num_gpus=2))
    assert (start.checkpoint.step, start.plan.max_steps, job.processes) == (8, 12, 2)
    command = write(job, output="command")
    assert "torchrun --standalone --nproc_per_node=2" in command
    assert "--resume 8 --run_name r" in command
    with pytest.raises(ConfigError, match=r"go back to checkpoint 8 .* the job of r$"):
        write(job, output="slurm")  # it is started again: each time from the same step
    _, job = plan_continuation(ResumeCommand(str(run_dir), num_gpus=2))
    for output in ("script", "slurm"):
        text = write(job, output=output)
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
        assert shlex.join(job.words) in text
    assert "--gpus" not in text, "the run was trained on a CPU"
    _, on_gpus = plan_continuation(ResumeCommand(str(run_dir), nodes=2, gpus=1))
    text = write(on_gpus, output="slurm")
    for part in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=1", "--rdzv_backend=c10d"):
        assert part in text


@pytest.mark.slow
def test_a_script_goes_on_in_the_folder_it_was_made_in(run_dir, tiny_data, tmp_path, monkeypatch):
    here = tmp_path / "my place"
    here.mkdir()
    (here / "data").symlink_to(tiny_data)
    text = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    python = launch.write_program(here / "my env" / "bin" / "python", text)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "executable", str(python))
    argv = ["--data_dir", "data", "--max_steps", "13", "--allow_change", "max_steps"]
    _, job = plan_continuation(ResumeCommand(str(run_dir)), argv)
    text = write(job, output="script")
    launch.worked(subprocess.run(["bash", "-c", text], cwd="/", **launch.TO_ITS_END))
    assert max(launch.steps(run_dir)) == 13


@pytest.mark.parametrize(
    ("words", "num_gpus"),
    [("--max_lr 1e-3", 1), ("--n_layer 3", 1), ("", 3), ("--no_such_flag 1", 1)],
)
def test_what_the_trainer_would_reject_is_rejected_now(run_dir, words, num_gpus, wording):
    before = sorted(os.listdir(run_dir))
    with pytest.raises(GPT2LabError, check=wording):
        plan_continuation(ResumeCommand(str(run_dir), num_gpus=num_gpus), words.split())
    assert sorted(os.listdir(run_dir)) == before
