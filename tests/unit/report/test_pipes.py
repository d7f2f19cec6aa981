"""A pipe among the files of a run that is shown, or continued: nothing waits for it."""

from __future__ import annotations

import os

import pytest

import launch


@pytest.mark.parametrize("name", ["config.json", "status.json", "run.json", "labels/best"])
def test_a_pipe_among_the_files_of_a_run_is_never_waited_for(tiny_run, name):
    run = tiny_run("--stop_after_steps=2", max_steps=4, checkpoint_freq=1, eval_freq=1)
    (run.path / name).unlink()
    os.mkfifo(run.path / name)
    for program in ("report", "runs resume-command"):
        done = launch.call(program, run.path)
        assert (done.returncode, done.stderr.count("\n")) in ((0, 0), (0, 1), (2, 1)), done.stderr
