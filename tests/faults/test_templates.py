"""The two scripts that start a run again: run as they stand, with a stand-in for Slurm's own command."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import PACE

import launch

pytestmark = pytest.mark.fault

UNTIL_DONE, SLURM = (str(launch.SCRIPTS / f"{name}.sh") for name in ("run_until_done", "slurm"))


def test_run_until_done_starts_again_after_a_kill(run, reference):
    argv = [word.replace(f"={run.folder}", "=~") for word in run.argv()]  # bash keeps this ~
    script = [UNTIL_DONE, *launch.command_for(launch.TRAIN, argv, world=1)]
    how = {"PAUSE": "0", "HOME": str(run.folder)}
    process = run.run_command(script, FAULT=PACE, **how)
    run.wait_for(process, "step", 7)
    os.kill(run.status()["pid"], signal.SIGKILL)
    assert run.end_of(process) == 0, run.errors()
    assert [event["from_step"] for event in run.events("resume")] == [5]
    run.assert_equals(reference(1))
    assert subprocess.run(script, env=launch.environment(**how), timeout=60).returncode == 0


def test_run_until_done_ends_with_a_stop_and_with_what_no_restart_cures(run):
    trainer = [sys.executable, str(launch.TRAIN)]
    process = run.run_command([UNTIL_DONE, *trainer, *run.argv()], PAUSE="0", FAULT=PACE)
    run.wait_for(process, "step", 3)
    assert (run.stop(process, signal.SIGINT), run.status()["reason"]) == (0, "SIGTERM")
    crash = {"MAX_CRASHES": "2", "FAULT": "step:kill9@20"}
    for words, how, code, message in (
        ([*trainer, *run.argv("--n_layer=3")], {}, 2, "a restart would meet the same"),
        ([*trainer, *run.argv()], crash, 1, "2 crashes without a new checkpoint"),
        ([*trainer, "--model=gpt2"], {}, 2, "needs --run_name"),
        ([], {}, 2, "usage: "),
        (["no-program"], {}, 127, "code 127: a restart would meet the same"),
    ):
        assert run.end_of(run.run_command([UNTIL_DONE, *words], PAUSE="0", **how)) == code
        assert message in run.errors()


def test_run_until_done_counts_the_crashes_since_the_last_checkpoint(run):
    """In a folder with a comma and a quote too; `count` is the number of the start."""
    run.path.mkdir(parents=True)
    status = '"checkpoint": "/a, \\"b\\"/step_\'$count\'",'
    lines = f"cd '{run.path}'; echo start >> starts; count=$(wc -l < starts); echo '{status}' > status.json"
    lines += "; echo $PWD/status.json > $GPT2LAB_STATUS_FILE; exit $((count < 4))"
    process = run.run_command([UNTIL_DONE, "bash", "-c", lines], PAUSE="0", MAX_CRASHES="2")
    assert run.end_of(process) == 0, run.errors()
    assert (run.path / "starts").read_text() == "start\n" * 4


def test_run_until_done_asked_during_its_pause_starts_nothing_more(run):
    marks = run.folder / "starts"
    command = ["bash", "-c", f"echo start >> '{marks}'; exit 1", *run.argv()]
    process = run.run_command([UNTIL_DONE, *command], PAUSE="60")
    run.wait_until(process, lambda: "starting again" in run.errors(), "a crash")
    assert (run.stop(process), marks.read_text()) == (1, "start\n")


def test_row_41_run_until_done_begins_nothing_anew_that_somebody_moved_away(run):
    """The launcher says 1 for it, as for a crash that a restart would cure."""
    script = [UNTIL_DONE, *launch.command_for(launch.TRAIN, run.argv(), world=2)]
    process = run.run_command(script, PAUSE="0", FAULT=PACE)
    run.wait_for(process, "checkpoint", 5)
    away = run.folder / "away"
    run.path.rename(away)
    assert run.end_of(process) == 75
    assert f"{run.path}: moved or deleted while training" in run.errors()
    assert "error: exit code 75: a restart would meet the same" in run.errors()
    assert not run.path.exists()
    away.rename(run.path)
    assert run.resume("--resume=auto") == 0, run.errors()
    assert [event["from_step"] for event in run.events("resume")] == [max(5, min(run.saved()))]


def test_row_41_run_until_done_begins_nothing_anew_that_went_between_two_starts(run):
    marks, away = run.folder / "starts", run.folder / "away"
    status = '{\n "state": "running",\n "checkpoint": null\n}'
    crash = f"mkdir '{run.path}'; echo '{status}' > '{run.path}/status.json'"
    crash += f"; echo '{run.path}/status.json' > $GPT2LAB_STATUS_FILE"
    lines = f"echo start >> '{marks}'; {crash}; mv '{run.path}' '{away}'; exit 1"
    process = run.run_command([UNTIL_DONE, "bash", "-c", lines, *run.argv()], PAUSE="0")
    assert run.end_of(process) == 75
    assert f"error: {run.path}: moved or deleted; put it back" in run.errors()
    assert marks.read_text() == "start\n"


def test_run_until_done_waits_for_a_folder_that_is_still_in_use(run):
    """Workers that save after their launcher was killed hold it for seconds, a dead NFS client for longer."""
    run.path.mkdir(parents=True)
    script = [UNTIL_DONE, *launch.command_for(launch.TRAIN, run.argv(), world=2)]
    with open(run.path / "run.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = run.run_command(script, PAUSE="0", MAX_CRASHES="1000")
        run.wait_until(process, lambda: "starting again" in run.errors(), "a rejection")
    assert run.end_of(process) == 0, run.errors()
    assert "in use by" in run.errors()


@pytest.mark.parametrize(
    ("state", "reason", "goes_back"),
    [
        *(("stopped", "max_hours", True), ("stopped", "STOP file", False)),
        *(("stopped", "stop_after_steps", False), ("stopped", "early stopping", False)),
        *(("stopped", "stop_at", False), ("failed", "a process died", True)),
        *(("failed", "without a new checkpoint", False), ("running", "", False)),
        ("stopped", "SLURM_JOB_END_TIME", False),  # before the first step
    ],
)
def test_slurm_puts_back_no_job_that_was_stopped_for_good(run, tmp_path, state, reason, goes_back):
    ends = int(state != "stopped")
    status = {"state": state, "reason": reason, "exit_code": ends if state == "failed" else None}
    (tmp_path / "said.json").write_text(json.dumps(status, indent=1) + "\n")
    starts, saved = '{"event": "begin"}\n' * 5, '{"event": "checkpoint"}\n{"event": "begin"}\n'
    (tmp_path / "metrics.jsonl").write_text(starts + saved * goes_back)
    for name, does in (
        ("torchrun", f"echo '{tmp_path}/said.json' > $GPT2LAB_STATUS_FILE; exit {ends}"),
        ("scontrol", f"touch '{tmp_path}/is_back'"),
    ):
        launch.write_program(tmp_path / name, f"#!/bin/sh\n{does}\n")
    environment = {"TORCHRUN": str(tmp_path / "torchrun"), "SLURM_JOB_ID": "7"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": "4"}
    of_run = int(not goes_back and (ends or reason == "SLURM_JOB_END_TIME"))
    for word, nodes, code in (("-x", "1", of_run), ("--resume=2", "1", 2), ("-x", "2", 2)):
        environment["SLURM_NNODES"] = nodes
        process = run.run_command(["bash", SLURM, *run.argv(word)], **environment)
        assert run.end_of(process) == code, run.errors()
    assert "resume-command RUN --output slurm --nodes" in run.errors()
    assert (tmp_path / "is_back").exists() == goes_back


def test_slurm_stops_before_the_jobs_end_and_puts_the_job_back(run, tmp_path):
    fake = f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.txt\n'
    folder = launch.write_program(tmp_path / "bin" / "scontrol", fake).parent
    run.flags = ("--checkpoint_freq=0", "--eval_freq=0", "--max_steps=100000", "--warmup_steps=0")
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
        "SLURM_JOB_ID": "7",
        "NPROC": "2",
        "FAULT": PACE,
        "SLURM_SUBMIT_DIR": str(launch.REPOSITORY),
    }
    script = ["bash", SLURM, *run.argv()]
    job_end = str(int(time.time()) + 20)
    assert run.end_of(run.run_command(script, SLURM_JOB_END_TIME=job_end, **environment)) == 0
    assert run.status()["reason"] == "SLURM_JOB_END_TIME"
    process = run.run_command(script, **environment)
    run.wait_for(process, "step", run.status()["step"] + 1, attempt=2)
    assert run.stop(process) == 0  # as --signal=B:TERM@120 does
    assert run.status()["reason"] == "SIGTERM"
    with open(run.path / "run.lock", "a+") as lock:  # that a failed node has held for some time
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.end_of(run.run_command(script, **environment)) == 0
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n" * 3
    rejected = run.run_command([*script, "--n_layer=3"], **environment)
    assert run.end_of(rejected) == 2, "and a rejected start is not put back on an older one's word"
    more = [*script, f"--max_steps={run.status()['step'] + 1}", "--allow_change=max_steps"]
    assert run.end_of(run.run_command(more, **environment)) == 0
    assert run.status()["state"] == "completed"
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n" * 3, "done is done"
