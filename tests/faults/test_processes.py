"""Rows 11, 12, 26, 29, 32 and 44: one process dies, errs, hangs, drifts, is slow or killed; the run says which."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import NO_ROLLING, PACE, STEPS, program_before, python_program

import launch

pytestmark = pytest.mark.fault

SOON = ("--shutdown-timeout=2",)  # in which torchrun kills
HALF = "    args[0].param_groups[0]['params'][0].data.add_(1)\n"  # of an update


# A trainer with this launches a step before it has read the loss of the one before, as on a GPU.
AHEAD = "from gpt2lab.distributed.runtime import Runtime\nRuntime.runs_ahead = True"


def test_a_rank_that_dies_in_the_update_of_sharded_state_is_named(run, tmp_path):
    dies = "if rank == 1 and calls == 9: os.kill(os.getpid(), signal.SIGKILL)"
    program = program_before(tmp_path, "gpt2lab.distributed.sharding.Bucket", "send", dies)
    assert run.finish("--parallel=zero1", world=2, program=program) != 0
    assert re.search(r"error: another rank of this run died in the update after step", run.errors())


@pytest.mark.parametrize("is_ahead", [False, True])
def test_row_11_a_process_is_killed_also_while_a_step_is_in_flight(
    is_ahead, run, reference, tmp_path
):
    """Also where SIGTERM comes after the save and before the line, as from torchrun on a busy machine.

    With a step in flight it counts step 14, whose loss it had not read, logs it and saves it.
    """
    run.flags, ends = NO_ROLLING, "os.kill(os.getpid(), signal.SIGTERM)"
    program = program_before(tmp_path, "gpt2lab.commands.entry", "_reject", ends)
    if is_ahead:
        program = python_program(tmp_path, AHEAD)
    assert run.finish(world=2, program=program, FAULT=f"{PACE};step:kill9@15,rank=1") != 0
    assert run.saved() == [14]
    assert "another rank of this run died after step 14; that step is saved" in run.errors()
    assert max(run.losses()) == 14
    run.resumes_as(reference(2), world=2, program=program)


@pytest.mark.parametrize("rank", [0, 1])
def test_row_11_a_process_is_killed_and_torchrun_restarts(rank, run, reference):
    """The survivor saves the last complete step, whichever it is; the same command line goes on as the same bits."""
    run.flags = NO_ROLLING
    once = f"""
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.environ["FAULT"] = "step:kill9@15,rank={rank}"
"""
    program = python_program(run.folder.parent, once)
    code = run.finish("--resume=auto", world=2, torchrun=("--max-restarts=1",), program=program)
    assert code == 0, run.errors()
    assert [event["from_step"] for event in run.events("resume")] == [14]
    run.assert_equals(reference(2))


def test_row_11_a_process_is_killed_after_its_update(run, reference, tmp_path):
    """Its survivor meets the error when both have the weights of step 10: saved as those of step 10, not of step 9."""
    run.flags = NO_ROLLING
    dies = "if args[1] == 10 and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)"
    program = program_before(tmp_path, "gpt2lab.training.health:Stragglers", "note", dies)
    assert run.finish(world=2, program=program) != 0
    assert run.saved() == [10], run.errors()
    run.resumes_as(reference(2), world=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_row_12_an_error_in_one_process(rank, run, reference):
    """As an out-of-memory error would: its traceback is the last thing that torchrun shows."""
    run.flags = NO_ROLLING
    assert run.finish(world=2, FAULT=f"{PACE};step:raise@15,rank={rank}") != 0
    assert "RuntimeError: fault point step at step 15" in run.errors().split("Root Cause")[1]
    assert run.saved() == [14]
    run.resumes_as(reference(2), world=2)


def test_row_11_a_survivor_is_aborted_100_ms_later(run, reference, tmp_path):
    """As NCCL's watchdog does where it is left on: whatever the rescue had reached, a checkpoint is whole."""
    run.flags, died = ("--checkpoint_freq=5", f"--max_steps={STEPS}"), tmp_path / "died"
    program = python_program(
        tmp_path,
        "import os, pathlib, threading, time\n"
        f"died, kill = pathlib.Path({str(died)!r}), os.kill\n"
        "def tell(pid, number):\n    died.touch()\n    kill(pid, number)\nos.kill = tell\n"
        "def watch():\n    while not died.exists():\n        time.sleep(0.001)\n"
        "    time.sleep(0.1)\n    os.abort()\n"
        "if os.environ['RANK'] == '0' and not died.exists():\n"
        "    threading.Thread(target=watch, daemon=True).start()",
    )
    assert run.finish(world=2, program=program, FAULT=f"{PACE};step:kill9@13,rank=1") != 0
    assert run.saved()[:2] == [5, 10]
    run.resumes_as(reference(2), world=2)
    assert run.events("resume")[0]["from_step"] in (10, 12)


def test_row_12_an_error_within_the_optimizer_saves_nothing(run, reference, tmp_path):
    fails = f"if calls == 15 and rank == 0:\n{HALF}    raise RuntimeError('CUDA out of memory')"
    program = program_before(tmp_path, "gpt2lab.optim.optimizers:AdamW", "step", fails)
    assert run.train(world=2, program=program) != 0
    assert "half-way" in run.errors()
    # Process 1 survives with a whole update 15; process 0's half one, and so its line, must not be on disk.
    assert run.resume(world=2) == 0, run.errors()
    expected = {n: loss for n, loss in reference(2).losses().items() if n in run.losses()}
    assert run.losses() == expected
    assert len(expected) >= STEPS - 1
    hashes = [launch.parameter_hash(r.path, STEPS) for r in (run, reference(2))]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_row_26_a_bad_gradient_on_one_process(rank, run, tmp_path):
    """All skip the same update, once; four in a row end the run and leave finite weights."""
    factor = "float('nan') if calls in (5, 20, 21, 22, 23) else 1.0"
    hook = f"args[0].register_forward_hook(lambda model, inputs, loss: loss * ({factor}))"
    spoils = f"if calls == 1 and rank == {rank}: {hook}"
    program = program_before(tmp_path, "gpt2lab.training.steps", "train_step", spoils)
    run.flags = ("--checkpoint_freq=1", "--eval_freq=0", "--max_steps=40", "--drift_check_freq=1")
    assert run.train(world=2, program=program) != 0
    assert run.status()["exit_code"] == 76, run.errors()
    assert [e["step"] for e in run.events("step") if not e["updated"]] == [5, 20, 21, 22, 23]
    assert max(run.saved()) in (22, 23)
    assert run.resume("--resume=latest", "--stop_after_steps=30", world=2) == 0, run.errors()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_row_29_a_frozen_process_is_named(is_ahead, run, reference, tmp_path):
    """Also while a step is in flight, which the watching thread then counts for the thread that hangs."""
    program = python_program(tmp_path, AHEAD) if is_ahead else launch.TRAIN
    frozen = {"world": 2, "program": program, "FAULT": f"{PACE};step:freeze@15,rank=1"}
    assert run.finish("--hang_seconds=1.5", torchrun=SOON, **frozen) != 0
    errors = run.errors()
    assert ("all wait for: rank 1 on" in errors, "silent for" in errors) == (True, True)
    assert is_ahead or "in train_step" in errors, "the stacks show where this process waited"
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 78)
    assert "rank 1" in run.status()["reason"]
    assert run.saved() == [5, 10, 14], "the last complete step"
    assert "the last complete step is saved" in run.status()["reason"]
    run.resumes_as(reference(2), "--resume=latest", "--hang_seconds=600", world=2)
    assert [event["from_step"] for event in run.events("resume")] == [14]


def test_row_29_a_step_that_never_ends_is_rescued_before_torchrun_kills(run, reference):
    """As over NCCL, where a peer's death is no error: torchrun asks to stop, waits, and kills."""
    fault = f"{PACE};step:freeze@15,rank=1"
    process = run.start_until("step", 14, world=2, torchrun=("--shutdown-timeout=30",), FAULT=fault)
    frozen = Path(f"/proc/{run.workers(process)[1]}/stat")
    run.wait_until(process, lambda: ") T " in frozen.read_text(), "rank 1 to freeze")
    assert run.stop(process) != 0
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 78)
    assert run.saved() == [5, 10, 14]
    run.resumes_as(reference(2), world=2)


def test_row_29_a_hang_within_an_update_saves_nothing(run, reference, tmp_path):
    """The weights are then those of no step: the watching thread leaves them alone."""
    hangs = f"if calls == 13:\n{HALF}    time.sleep(600)"
    program = program_before(tmp_path, "gpt2lab.optim.optimizers:AdamW", "step", hangs)
    assert run.finish("--hang_seconds=1", world=2, torchrun=SOON, program=program) != 0
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 78)
    assert "is saved" not in run.status()["reason"]
    assert run.saved() == [5, 10]
    run.resumes_as(reference(2), "--resume=latest", "--hang_seconds=600", world=2)


def test_row_29_a_process_that_waits_for_data_is_named(run, tmp_path):
    """It is alive and says so; the others wait for it in the next agreement."""
    waits = "if rank == 1 and args[1] == 80:\n    time.sleep(600)"
    program = program_before(tmp_path, "gpt2lab.data.loader:Loader", "fetch", waits)
    assert run.finish("--hang_seconds=1", world=2, torchrun=SOON, program=program) != 0
    assert "all wait for: rank 1 on" in run.errors()
    assert "reading data of step 11" in run.errors()
    assert "rank 0 on" not in run.errors().split("all wait for: ")[1].split("\n")[0]


def with_stopped_output(folder: Path, *, hangs: bool) -> Path:
    """Return a trainer whose output nobody reads and whose pipe is full from step 12 on; step 15 may never end.

    From step 12 on every step warns on stderr.
    """
    return python_program(
        folder,
        "import os, time, warnings\nimport gpt2lab.training.steps as t\n"
        "reading, writing = os.pipe()\n"
        "sys.stdout, sys.stderr = (open(os.dup2(writing, n), 'w') for n in (1, 2))\n"
        "plain = t.train_step\n"
        "def step(model, o, batch, *a, **k):\n"
        "    if batch.first_sample == 8 * 11:\n"
        "        pipe = os.open('/proc/self/fd/1', os.O_WRONLY | os.O_NONBLOCK)\n"
        "        try:\n            while os.write(pipe, b'x' * 4096):\n                pass\n"
        "        except BlockingIOError:\n            pass\n"
        "    if batch.first_sample >= 8 * 11:\n"
        "        warnings.warn(f'sample {batch.first_sample}')\n"
        f"    if {hangs} and batch.first_sample == 8 * 14:\n        time.sleep(600)\n"
        "    return plain(model, o, batch, *a, **k)\nt.train_step = step",
    )


def test_row_48_a_run_goes_on_when_nobody_reads_its_output(run, reference, tmp_path):
    """The line of a step once stopped it, within the lock that a rescue needs: nothing was saved then."""
    program = with_stopped_output(tmp_path, hangs=False)
    assert run.finish("--hang_seconds=10", "--log_freq=1", program=program) == 0
    run.assert_equals(reference(1))
    said = (run.path / "log.txt").read_text()
    assert all(f"step {step}/{STEPS} | epoch" in said for step in range(1, STEPS + 1))


def test_row_48_a_hang_is_rescued_when_nobody_reads_its_output(run, reference, tmp_path):
    """The report of the hang once waited for stderr, before the rescue and for good."""
    program = with_stopped_output(tmp_path, hangs=True)
    assert run.finish("--hang_seconds=1.5", "--log_freq=1", program=program) == 78
    assert run.saved() == [5, 10, 14]
    assert "the last complete step is saved" in run.status()["reason"]
    run.resumes_as(reference(1), "--resume=latest", "--hang_seconds=600")


def test_row_32_replicas_that_differ_stop_the_run(run, reference, tmp_path):
    differs = "if calls == 12 and rank == 1:\n    args[0].module.ln_f.bias.data[3] += 1e-6"
    program = program_before(tmp_path, "gpt2lab.training.steps", "train_step", differs)
    assert run.train("--drift_check_freq=6", world=2, program=program) != 0
    assert "step 12: ranks hold different weights, first in " in run.errors()
    assert "rank 1 " in run.errors()
    assert run.status()["exit_code"] == 1
    assert run.saved() == [5, 10], "nothing after the fault"
    run.resumes_as(reference(2), world=2)


@pytest.mark.parametrize("where", ["forward", "data"])
def test_a_slow_process_is_named(where, run, tmp_path):
    delay = 0.5  # seconds
    target = {
        "forward": ("gpt2lab.model.gpt:GPT", "forward"),
        # Where a step waits for its data: a batch is read beside the step before, which would hide some of the delay.
        "data": ("concurrent.futures:Future", "result"),
    }[where]
    program = program_before(tmp_path, *target, f"time.sleep({delay} * rank)")
    more = ("--mini_batch_size=4", "--max_steps=35", "--warmup_steps=2")
    assert run.train(*more, world=2, program=program) == 0, run.errors()
    warnings = [e["message"] for e in run.events("warning") if "is slow" in e["message"]]
    assert len(warnings) == 1
    assert warnings[0].startswith("rank 1 on ")
    waited = float(re.search(r"\(([\d.]+) s waiting for data\)", warnings[0])[1])
    assert (waited > delay / 2) == (where == "data")


CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 64 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a control group with little memory; skip where that is not allowed."""
    group, places = None, {}
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            places[controllers] = path.lstrip("/")
        parent, limit = CGROUPS / places.get("", ""), "memory.max"
        if "memory" in places:  # version 1
            parent, limit = CGROUPS / "memory" / places["memory"], "memory.limit_in_bytes"
        (group := parent / f"g2l-{os.getpid()}").mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    else:
        yield group
    finally:
        if group is not None and group.is_dir():
            group.rmdir()


def test_row_44_a_rank_killed_for_its_memory_is_started_again(
    run, reference, small_group, tmp_path
):
    """The other rank saves the step and ends, and run_until_done.sh goes on from there by itself."""
    group, once = str(small_group / "cgroup.procs"), str(tmp_path / "once")
    takes = (
        f"if rank == 1 and args[2].first_sample == 8 * 14 and not os.path.exists({once!r}):\n"
        f"    open({once!r}, 'x').close()\n"
        f"    open({group!r}, 'w').write(str(os.getpid()))\n    bytearray(os.urandom({4 * LIMIT}))"
    )
    program = program_before(tmp_path, "gpt2lab.training.steps", "train_step", takes)
    run.flags = NO_ROLLING
    script = str(launch.SCRIPTS / "run_until_done.sh")
    command = [script, *launch.command_for(program, run.argv(), world=2)]
    assert run.end_of(run.run_command(command, PAUSE="0", FAULT=PACE)) == 0, run.errors()
    events = (small_group / name for name in ("memory.oom_control", "memory.events"))
    assert "oom_kill 1" in "".join(path.read_text() for path in events if path.exists())
    assert "another rank of this run died after step 14; that step is saved" in run.errors()
    assert "ended with exit code 1; starting again in 0 s" in run.errors()
    assert [event["from_step"] for event in run.events("resume")] == [14]
    run.assert_equals(reference(2))
