"""`--gpus 2` beside torchrun: the run ends alike; our launcher adds the exit code, and the cause as its last line."""

import os
import signal
from dataclasses import dataclass

import pytest
from harness import NO_ROLLING, PACE, FaultRun

pytestmark = pytest.mark.fault
HANG = ("--hang_seconds=1.5",)


@dataclass(frozen=True)
class Case:
    """What happens to a run of two ranks, and how it ends."""

    fault: str = ""
    flags: tuple[str, ...] = ()
    sent: signal.Signals | None = None  # to the launcher, after step 6
    codes: tuple[int, int] = (1, 1)  # of torchrun, and of --gpus
    state: str | None = "failed"
    exit_code: int | None = 1  # in status.json
    saved: tuple[int, ...] | None = None  # None: the step that the status names
    line: str = "error: "  # how the last line begins, under --gpus


def stopped(sent: signal.Signals, *, codes: tuple[int, int]) -> Case:
    return Case(sent=sent, codes=codes, state="stopped", exit_code=0, line="")


CASES = {
    "a rank is killed": Case("step:kill9@15,rank=1", saved=(14,), line="error: rank 1 "),
    "rank 0 is killed": Case(
        "step:kill9@15,rank=0", state="running", exit_code=None, saved=(14,), line="error: rank 0 "
    ),
    "an error on a rank": Case("step:raise@15,rank=1", saved=(14,), line="RuntimeError: "),
    "an error of all": Case(flags=("--max_lr=1e30",), codes=(1, 76), exit_code=76, saved=()),
    "a rejection": Case(flags=("--resume=7",), codes=(1, 2), state=None),
    "a hang": Case("step:freeze@15,rank=1", HANG, codes=(1, 78), exit_code=78, saved=(14,)),
    "the launcher is killed": stopped(signal.SIGKILL, codes=(-9, -9)),
    "SIGTERM": stopped(signal.SIGTERM, codes=(1, 0)),
    "Ctrl+C": stopped(signal.SIGINT, codes=(1, 0)),
}


@pytest.mark.parametrize("launcher", ["torchrun", "gpus"])
@pytest.mark.parametrize("name", CASES)
def test_both_launchers_end_a_run_alike(name, launcher, run: FaultRun):
    case, how = CASES[name], {"FAULT": ";".join(filter(None, [PACE, CASES[name].fault]))}
    how["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "2" if "hang" in name else "30"
    run.flags = (*NO_ROLLING, *case.flags)
    world, more = (1, ["--gpus=2"]) if launcher == "gpus" else (2, [])
    process = run.start(*more, world=world, **how)
    if case.sent is not None:
        run.wait_for(process, "step", 6)
        process.send_signal(case.sent)
    assert run.end_of(process) == case.codes[launcher == "gpus"], run.errors()
    if case.state is not None:
        status = run.status()
        assert (status["state"], status["exit_code"]) == (case.state, case.exit_code)
        expected = (status["step"],) if case.saved is None else case.saved
        assert tuple(run.saved()) == expected
    if launcher == "gpus":
        last = run.errors().splitlines()[-1:]
        assert last == [] if case.line == "" else last[0].startswith(case.line), run.errors()
        assert "torch.distributed" not in run.errors()


def test_a_run_under_nohup_outlives_its_terminal(run: FaultRun):
    """A terminal that closes sends SIGHUP to all its processes; `nohup` has them ignore it."""
    run.flags = NO_ROLLING
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is started now inherits that
    process = run.start("--gpus=2", FAULT=PACE)
    signal.signal(signal.SIGHUP, usual)
    run.wait_for(process, "step", 6)
    for pid in (process.pid, *run.workers(process).values()):
        os.kill(pid, signal.SIGHUP)
    run.wait_for(process, "step", 9)
    assert run.stop(process) == 0, run.errors()
    assert (run.status()["state"], run.status()["reason"]) == ("stopped", "SIGTERM")
