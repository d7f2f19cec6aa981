"""Row 49: a signal, or the launcher's death, before the first step: the process ends at once, and none is left."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from harness import FaultRun, program_before

import launch
from loopback import free_port

pytestmark = pytest.mark.fault

# Python imports this file at its start. WHO gets NUMBER at import AT of this process, or of the rank that is named.
AT_AN_IMPORT = """
import os, sys

count = 0

def note(event, args):
    global count
    if event == "import" and (count or args[0].startswith(os.environ["FROM"])):
        count += 1
        if count == int(os.environ["AT"]):
            who = os.getppid() if os.environ["WHO"] == "parent" else os.getpid()
            os.kill(who, int(os.environ["NUMBER"]))

if os.environ.get("RANK") == os.environ.get("AT_RANK"):
    sys.addaudithook(note)
"""
MOMENTS = int(os.environ.get("MOMENTS", "3"))
IMPORTS = 1200  # of a start, to its first step; torch's are the most


def moments(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, range(1, IMPORTS, IMPORTS // MOMENTS))


def begin(run: FaultRun, folder: Path, *, world: int, **where: object) -> subprocess.Popen[str]:
    """Start a run that something happens to at an import."""
    (folder / "sitecustomize.py").write_text(AT_AN_IMPORT)
    hook = {name: str(value) for name, value in where.items()}
    process = launch.start(run.argv("--resume=auto"), world=world, PYTHONPATH=str(folder), **hook)
    run.processes.append(process)
    return process


def end_of(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return exit code and lines of stderr, once nobody holds that pipe: neither the process nor one of its ranks."""
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@moments("at")
def test_a_signal_ends_a_start_at_once(at, number, run, tmp_path):
    """Torch's C++ code aborts on an exception (exit code -6): none is raised while it is imported."""
    where = {"FROM": "gpt2lab.commands", "AT": at, "WHO": "self", "NUMBER": int(number)}
    code, errors = end_of(begin(run, tmp_path, world=1, **where))
    assert (code, len(errors)) == (1, 1), errors
    assert run.saved() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@moments("at")
def test_no_rank_outlives_its_launcher(at, number, run, tmp_path):
    """They waited for each other as long as the process group allows, an hour, deaf to SIGTERM."""
    where = {"FROM": "", "AT": at, "WHO": "parent", "NUMBER": int(number), "AT_RANK": 1}
    code, _ = end_of(begin(run, tmp_path, world=2, **where))
    assert (code, run.saved()) == ((1 if number == signal.SIGTERM else -number), [])


def test_a_signal_ends_a_rank_that_waits_for_another(run):
    port = free_port()
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    process = launch.start(run.argv(), MASTER_PORT=str(port), **group)
    run.processes.append(process)
    is_alone = True
    while is_alone:  # until it listens for its peer
        assert process.poll() is None
        time.sleep(0.05)
        with socket.socket() as peer:
            is_alone = peer.connect_ex(("localhost", port)) != 0
    process.send_signal(signal.SIGTERM)
    assert end_of(process)[0] == 1


@pytest.mark.parametrize("again", ["--resume=auto", "--log_freq=999"])
def test_what_ends_before_the_first_step_begins_again(again, run, reference, tmp_path):
    """At the last moment: the run has its folder and its status."""
    ends = "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)"
    strategy = "gpt2lab.distributed.strategy:Strategy"
    program = program_before(tmp_path, strategy, "warm_up_reducer", ends)
    assert (run.finish(program=program), run.status()["state"]) == (1, "running")
    run.resumes_as(reference(1), again)
