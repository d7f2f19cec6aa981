"""Rows 5 to 10 and 28: whatever asks a run to end, it ends at one step, which is on disk, and nothing is lost.

Rows 1 to 3: kill -9 at random instants, and while it retires, and at the last step. More random ones: soak.py.
"""

import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import NO_ROLLING, PACE, FaultRun, program_before, python_program

import launch
from last_step import LAST, after_last_step, assert_complete, flags_of, straight_run

pytestmark = pytest.mark.fault

SEED = int(os.environ.get("SEED", "1337"))
FOREVER = ("--checkpoint_freq=0", "--eval_freq=0", "--max_steps=100000")


def assert_stopped_cleanly(run: FaultRun, reason: str) -> None:
    """All ranks ended at one step, it is saved, and it is the last one taken."""
    [stop] = run.events("stop")
    assert (stop["reason"], stop["step"]) == (reason, max(run.steps()))
    assert stop["step"] in run.saved()
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("stopped", 0)
    assert (status["step"], status["reason"]) == (stop["step"], reason)
    assert status["checkpoint"] == stop["checkpoint"]
    assert status["resume"].endswith(f"--resume latest --checkpoint_dir {run.path.parent}")


@pytest.mark.parametrize("world", [1, 2])
def test_row_05_sigterm_to_the_launcher(world, run, reference):
    run.flags = NO_ROLLING
    process = run.start_until("step", 7, world=world, FAULT=PACE)
    assert run.stop(process) == (world == 2)  # torchrun calls every stop by signal a failure
    assert_stopped_cleanly(run, "SIGTERM")
    assert run.saved() == [run.status()["step"]], "nothing else was due: the stop itself saved"
    run.resumes_as(reference(world), world=world)


def test_row_05_sigterm_within_a_save(run, reference):
    """The commit in flight ends, and is the checkpoint of the stop: none is written twice."""
    process = run.start(FAULT=f"{PACE};checkpoint.optim.safetensors:sleep0.7@10")
    run.wait_until(process, lambda: bool(list(run.path.glob(".tmp-00000010-*"))), "save of step 10")
    assert run.stop(process) == 0
    assert_stopped_cleanly(run, "SIGTERM")
    assert (run.status()["step"], [e["step"] for e in run.events("checkpoint")]) == (10, [5, 10])
    run.resumes_as(reference(1), world=1)


def test_row_05_sigterm_within_an_evaluation(run, tmp_path):
    """Of two processes, one hears it; both leave the evaluation at the same batch."""
    batch = ("gpt2lab.evaluation.validation:Validation", "_measure_windows")
    slow = program_before(tmp_path, *batch, "time.sleep(0.25)")
    run.flags = ("--checkpoint_freq=0", "--eval_freq=4", "--max_steps=8")
    process = run.start(world=2, program=slow)  # 20 windows: 2.5 s and more for each evaluation
    run.wait_for(process, "step", 4)
    os.kill(run.workers(process)[1], signal.SIGTERM)
    assert run.end_of(process) == 0
    assert_stopped_cleanly(run, "SIGTERM")
    assert (run.status()["step"], [e["step"] for e in run.events("eval")]) == (4, [0])


def test_row_06_sigterm_to_one_rank(run, reference):
    """Torchrun never hears of it and reports success; world 2 goes on as the same bits."""
    run.flags = NO_ROLLING
    process = run.start_until("step", 6, world=2, FAULT=PACE)
    os.kill(run.workers(process)[1], signal.SIGTERM)
    assert run.end_of(process) == 0
    assert_stopped_cleanly(run, "SIGTERM")
    run.resumes_as(reference(2), world=2)


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_row_07_ctrl_c(presses, run):
    """Once and twice save; three times end at once. No process is ever left behind."""
    run.flags = ("--checkpoint_freq=5", "--eval_freq=0", "--max_steps=100000")
    fault = f"{PACE};checkpoint.model.safetensors:sleep1.5@*" if presses > 1 else PACE
    process = run.start_until("checkpoint", 5, world=2, FAULT=fault)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # as a person does; the state waited for is the end, below
    run.end_of(process)
    saved = run.saved()
    assert saved, "the newest commit stands"
    if presses < 3:
        assert_stopped_cleanly(run, run.status()["reason"])
        assert run.status()["reason"] in ("SIGINT", "SIGTERM")
    assert run.resume("--resume=latest", f"--stop_after_steps={saved[-1] + 3}", world=2) == 0
    assert [e["from_step"] for e in run.events("resume")] == [saved[-1]]


@pytest.mark.parametrize(("ranks", "code"), [(1, 0), (2, 1)])
def test_row_07_ctrl_c_that_ends_a_compiler_too_is_a_stop(ranks, code, run, tmp_path):
    """A terminal sends it to all processes of a program. Several ranks cannot agree on a save within a step."""
    waits = f'case "$*" in *main.cpp*|*precompiled*) touch {tmp_path}/compiles; sleep 60;; esac'
    compiler = launch.write_program(tmp_path / "c", f'#!/bin/sh\n{waits}\nexec g++ "$@"\n')
    run.flags = ("--eval_freq=0", "--max_steps=9", "--compile=on")
    own = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    sharded = (f"--gpus={ranks}", "--parallel=fsdp") if ranks > 1 else ()
    process = run.start(*sharded, **own)
    run.wait_until(process, (tmp_path / "compiles").exists, "a compiler")
    os.killpg(process.pid, signal.SIGINT)
    assert run.end_of(process) == code, run.errors()
    if ranks > 1:
        assert run.errors().splitlines()[-1] == "error: interrupted"
        assert "Traceback" not in run.errors()
        return
    status = run.status()
    assert (status["state"], status["reason"], status["step"]) == ("stopped", "SIGINT", 0)
    assert run.resume("--resume=auto", "--compile=off", "--allow_change=compile") == 0


def test_row_08_sigusr1_that_torchrun_forwards_saves_and_goes_on_to_stop(run):
    """Asked to handle it, torchrun forwards it and then ends as for SIGTERM: the step is on disk either way."""
    run.flags = FOREVER
    process = run.start(world=2, torchrun=("--signals-to-handle=SIGTERM,SIGUSR1",), FAULT=PACE)
    run.wait_for(process, "step", 6)
    for pid in run.workers(process).values():
        os.kill(pid, signal.SIGUSR1)
    run.wait_for(process, "checkpoint", 6)
    assert [e["kind"] for e in run.events("checkpoint")] == ["rolling"], "one save for two signals"
    run.stop(process)
    assert_stopped_cleanly(run, "SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL, signal.SIGHUP])
def test_rows_08_and_09_the_launcher_dies(number, run, reference):
    """The first two kill torchrun at once; the kernel tells the workers, and they save and end."""
    run.flags = NO_ROLLING
    process = run.start_until("step", 6, world=2, FAULT=PACE)
    process.send_signal(number)
    assert run.end_of(process) == -number or number == signal.SIGHUP
    assert_stopped_cleanly(run, "SIGHUP" if number == signal.SIGHUP else "SIGTERM")
    run.resumes_as(reference(2), world=2)


def test_row_10_a_stop_that_outlasts_the_grace(run, reference):
    """Said beforehand, with the cure; killed within the save, the previous checkpoint stands."""
    fault = f"{PACE};checkpoint.optim.safetensors:sleep4@*"
    process = run.start(world=2, torchrun=("--shutdown-timeout=2",), FAULT=fault)
    run.wait_for(process, "warning", 5)
    [warning] = run.events("warning")[-1:]
    assert "torchrun kills after 2 s" in warning["message"]
    assert "--shutdown-timeout" in warning["message"]
    run.wait_for(process, "step", 7)
    assert run.stop(process) != 0
    assert run.saved() == [5]
    assert run.status()["state"] == "running", "nobody was left to say otherwise"
    run.resumes_as(reference(2), world=2)


@pytest.mark.parametrize("world", [1, 2])
def test_files_stop_and_save_are_taken_up(world, run):
    run.flags = FOREVER
    process = run.start_until("step", 3, world=world, FAULT=PACE)
    (run.path / "SAVE").touch()
    run.wait_for(process, "checkpoint", 3)
    assert not (run.path / "SAVE").exists()
    (run.path / "STOP").touch()
    assert run.end_of(process) == 0
    assert_stopped_cleanly(run, "STOP file")
    assert not (run.path / "STOP").exists(), "the next start must not stop too"
    assert len(run.events("checkpoint")) == 2


# Moments count from when torch has been imported: how long that takes is the machine's affair.
IMPORTED = "import os, sys, time\nimport gpt2lab.training.trainer as t\n"


def test_a_typed_moment_stops_in_time(run, tmp_path):
    run.flags = FOREVER
    program = python_program(
        tmp_path,
        IMPORTED + "from datetime import datetime, timedelta\n"
        "moment = datetime.now().astimezone() + timedelta(seconds=10)\n"
        "sys.argv.append(f'--stop_at={moment.isoformat()}')",
    )
    assert run.train(program=program, FAULT=PACE) == 0
    assert_stopped_cleanly(run, "stop_at")


@pytest.fixture
def set_clock(tmp_path) -> Callable[[int], dict[str, str]]:
    """Return a function that sets the wall clock of programs started with the environment it returns, in hours."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler to build a library with that sets the clock of a process")
    library, offset = tmp_path / "jumping_clock.so", tmp_path / "offset"
    source = launch.WORKERS / "jumping_clock.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    offset.write_bytes(bytes(8))

    def set_to(hours: int) -> dict[str, str]:
        with open(offset, "rb+") as file:  # in place: it is mapped into memory
            file.write(struct.pack("=q", 3600 * hours))
        return {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}

    return set_to


@pytest.mark.parametrize("hours", [-24, 24])
def test_row_28_a_clock_that_jumps_changes_nothing(hours, run, tmp_path, set_clock):
    """Neither the job's end, nor the minutes between saves, nor times, rates and forecasts follow the wall clock."""
    run.flags = (*FOREVER, "--checkpoint_minutes=0.02", "--keep_checkpoints=100")
    ends = IMPORTED + "os.environ['SLURM_JOB_END_TIME'] = str(int(time.time()) + 16)"
    program = python_program(tmp_path, ends)
    process = run.start("--hang_seconds=60", program=program, FAULT=PACE, **set_clock(0))
    run.wait_for(process, "step", 20)
    set_clock(hours)
    jumped_at = max(run.steps())
    assert run.end_of(process) == 0
    # It did not stop where the clock jumped, nor did it go on for a day.
    assert max(run.steps()) > jumped_at + 5
    assert_stopped_cleanly(run, "SLURM_JOB_END_TIME")
    assert len(run.saved()) >= 3
    events = run.events("step")
    jumps = [b["time"] - a["time"] for a, b in itertools.pairwise(events)]
    assert sum(abs(jump) > 3600 for jump in jumps) == 1, "the events' own times did jump"
    assert all(0 < event["step_seconds"] < 3600 for event in events)
    assert all(0 < event["tokens_per_second"] < 1e9 for event in events)
    elapsed = [event["elapsed_seconds"] for event in events]
    assert 0 < elapsed[0] <= elapsed[-1] < 3600
    assert elapsed == sorted(elapsed)
    left = [event["remaining_seconds"] for event in events if event["remaining_seconds"]]
    assert all(0 < seconds < 24 * 3600 for seconds in left)
    assert [e["seconds"] for e in run.events("checkpoint") if not 0 <= e["seconds"] < 3600] == []


def test_row_01_random_kills_of_two_processes(run, reference):
    """The launcher and both workers at once, as a machine that loses power."""
    dice = random.Random(SEED)
    for attempt, step in ((1, dice.randrange(6, 14)), (2, dice.randrange(18, 28))):
        process = run.start("--resume=auto", world=2, FAULT=PACE)
        run.wait_for(process, "step", step, attempt)
        for pid in (process.pid, *run.workers(process).values()):
            os.kill(pid, signal.SIGKILL)
        run.end_of(process)
        assert run.saved()[-1] >= step - 5
    run.resumes_as(reference(2), "--resume=auto", world=2)


@pytest.mark.parametrize("point", ["before_delete", "after_rename"])
def test_rows_02_and_03_killed_while_a_checkpoint_is_retired(point, run, reference):
    """What is listed afterwards is complete, and is the newest that was committed."""
    run.flags = (*run.flags, "--keep_checkpoints=1")
    assert run.train(FAULT=f"retain.{point}:kill9@15") != 0
    words = ["--list_checkpoints", "--verify", "--json", f"--checkpoint_dir={run.folder}"]
    listed = launch.train_in_forks(words)
    assert listed.returncode == 0, listed.stdout
    steps = [row["step"] for row in json.loads(listed.stdout)["runs"][0]["checkpoints"]]
    assert steps[-1] == 15
    run.resumes_as(reference(1))
    assert [event["from_step"] for event in run.events("resume")] == [15]
    assert not [*run.path.glob(".tmp-*"), *run.path.glob(".del-*")]


PLACES = [
    *("checkpoint.after_rename", "checkpoint.before_label", "checkpoint.after_label"),
    *("end.before_done", "end.after_done", "end.before_status"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return straight_run(tmp_path_factory.mktemp("last"))


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_the_last_step_loses_nothing(folder, place):
    name = f"kill_{place}"
    flags = flags_of(folder, name)
    assert launch.train_in_forks(flags, FAULT=f"{place}:kill9@{LAST}").returncode == -9
    launch.worked(launch.train_in_forks([*flags, "--resume=auto"]))
    assert_complete(folder, name)


@pytest.mark.parametrize("fault", ["measure.eval:term", "measure.sample:raise"])
def test_two_ranks_go_on_after_an_interruption_of_one(folder, fault):
    rank = 0 if "sample" in fault else 1
    name = f"two_{fault}".replace(":", "_")
    flags = flags_of(folder, name)
    code = launch.train_in_forks(flags, world=2, FAULT=f"{fault}@{LAST},rank={rank}").returncode
    assert (code == 0) == ("term" in fault)
    state = json.loads((folder / "runs" / name / "status.json").read_text())["state"]
    assert state == ("stopped" if "term" in fault else "failed")
    launch.worked(launch.train_in_forks([*flags, "--resume=auto"], world=2))
    assert json.loads((folder / "runs" / name / "status.json").read_text())["state"] == "completed"
    events = after_last_step(folder / "runs" / name)
    assert {kind: len(found) for kind, found in events.items()} == dict.fromkeys(events, 1)
