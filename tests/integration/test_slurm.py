"""The batch script of `runs resume-command` in a real Slurm of one node, made from the packages slurm-wlm and munge."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import launch
from gpt2lab.commands.ablate import read_requests
from gpt2lab.commands.resume_command import ResumeCommand, plan_continuation, write, write_array
from gpt2lab.lab.seed_runs import plan_runs
from tiny import TINY
from whole_run import Run

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
HAS_SLURM = all(map(shutil.which, PROGRAMS)) and os.geteuid() == 0
WHY = "needs root and: apt-get install slurm-wlm munge"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_SLURM, reason=WHY)]
CONF = """ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName={host} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("", 0))
        two.bind(("", 0))
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Start a cluster of this machine; return the environment in which its commands find it."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o700)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, ports=free_ports()))
    found = {**os.environ, "SLURM_CONF": str(conf)}
    munge = [f"--{what}-file={folder / what}" for what in ("key", "log", "pid", "seed")]
    started = []
    try:
        for words in (
            ["munged", "--force", "--foreground", f"--socket={folder / 'socket'}", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            with open(folder / f"{words[0]}.out", "wb") as log:
                started.append(subprocess.Popen(words, env=found, stdout=log, stderr=log))
            time.sleep(1)
        wait_for(found, ["sinfo", "--noheader", "--format=%T"], "idle")
        yield found
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)


def wait_for(env: dict[str, str], words: list[str], wanted: str) -> str:
    """Repeat a command until it says something that is wanted."""
    for _ in range(launch.HANG_SECONDS):
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        if wanted in done.stdout:
            return done.stdout
        time.sleep(1)
    pytest.fail(f"{words} never said {wanted}: {done.stdout}{done.stderr}")


def submit(env: dict[str, str], script: str, folder: Path) -> str:
    path = folder / "job.sh"
    path.write_text(script + "\n")
    words = ["sbatch", "--parsable", path]
    done = launch.worked(subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True))
    return done.stdout.strip()


def test_a_job_saves_at_its_end_and_is_queued_again(slurm, tiny_data, tmp_path, monkeypatch):
    here = tmp_path / "a place; with $(names)"
    here.mkdir()
    monkeypatch.chdir(here)
    run = Run(tiny_data, here / "runs", "--max_steps=4000", "--checkpoint_freq=0", "--eval_freq=0")
    run.train("--stop_after_steps=2")
    _, plan = plan_continuation(ResumeCommand(str(run.path)))
    job = submit(slurm, write(plan, output="slurm"), here)
    show = ["scontrol", "show", "job", job]
    wait_for(slurm, ["cat", run.path / "metrics.jsonl"], '"step": 3,')
    # What Slurm itself does two minutes before the time limit.
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=slurm, check=True)
    wait_for(slurm, show, "Restarts=1")
    stop = launch.events(run.path, "stop")[-1]
    assert (stop["reason"], run.status()["exit_code"]) == ("SIGTERM", 0)
    assert stop["step"] in run.checkpoints()
    (run.path / "STOP").touch()
    subprocess.run(["scancel", job], env=slurm, check=True)


def test_an_array_trains_a_grid_and_one_task_is_queued_again_alone(slurm, tiny_data, tmp_path):
    """The last task of an array has the array's own id: what it asks of Slurm must not reach the others."""
    words = [*TINY, f"--data_dir={tiny_data}", "--max_steps=300", "--checkpoint_freq=0"]
    settings = {"a": ["--max_lr=0.01"], "b": ["--max_lr=0.02"]}
    runs = plan_runs(read_requests(settings, words), seeds=(1,), out=tmp_path / "grid of two")
    for run in runs:
        run.write_settings()
    plan = ResumeCommand(str(runs[0].out), output="slurm", array=True, gpus=0)
    slow = slurm | {"FAULT": "step:sleep0.1@*"}
    job = submit(slow, write_array(plan).replace("cpus-per-task=4", "cpus-per-task=1"), tmp_path)
    for run in runs:
        wait_for(slurm, ["cat", run.folder / "metrics.jsonl"], '"step": 3,')
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{job}_1"], env=slurm, check=True)
    show = ["scontrol", "show", "job", job]
    assert wait_for(slurm, show, "Restarts=1").count("Restarts=0") == 1
    wait_for(slurm, ["cat", runs[1].folder / "status.json"], "SIGTERM")
    assert "stop" not in {event["event"] for event in launch.all_events(runs[0].folder)}
    subprocess.run(["scancel", job], env=slurm, check=True)


def test_a_job_ends_with_the_run(slurm, tiny_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(tiny_data, tmp_path / "runs", "--max_steps=6")
    run.train("--stop_after_steps=2")
    _, found = plan_continuation(ResumeCommand(str(run.path)))
    job = submit(slurm, write(found, output="slurm"), tmp_path)
    wait_for(slurm, ["scontrol", "show", "job", job], "JobState=COMPLETED")
    assert (run.status()["state"], max(launch.steps(run.path))) == ("completed", 6)
