"""Row 36 and on: the folder, the data and the process itself change under a run."""

import fcntl
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from harness import PACE, STEPS, FaultRun, program_before

from gpt2lab.interop.import_shards import ImportOptions, import_folder

pytestmark = pytest.mark.fault

LOST = 75  # nothing more can be saved
FOREVER = ("--checkpoint_freq=5", "--eval_freq=0", "--max_steps=100000")


def the_line(run: FaultRun) -> str:
    """Return the one line that the last start's first rank wrote to stderr, without torchrun's own."""
    assert "src/gpt2lab/" not in run.errors(), "a stack of ours"
    [line] = {line for line in run.errors().splitlines() if line.startswith("error: ")}
    return line


def test_row_36_a_deleted_lock_lets_nobody_else_in(run):
    """It is made again within a step: a second start is rejected, and every step is recorded once."""
    run.flags = FOREVER
    process = run.start_until("step", 3, FAULT=PACE)
    lock = run.path / "run.lock"
    before = lock.stat().st_ino
    lock.rename(lock.with_suffix(".gone"))  # its number cannot be given to the new file
    run.wait_until(process, lambda: lock.exists() and bool(lock.read_text()), "a new lock")
    assert lock.stat().st_ino != before
    assert run.resume("--resume=auto", "--stop_after_steps=400") == 2
    assert f"in use by process {process.pid} on " in the_line(run)
    assert run.stop(process) == 0
    taken = [event["step"] for event in run.events("step")]
    assert taken == list(range(1, max(run.saved()) + 1))
    [warning] = [text for e in run.events("warning") if "run.lock" in (text := e["message"])]
    assert "was deleted while training, and is made again" in warning


@pytest.mark.parametrize("world", [1, 2])
def test_row_36_who_finds_the_lock_of_another_start_writes_nothing_more(world, run):
    """The other one may be in the middle of anything; its lock, its lines and its status are left alone."""
    run.flags = FOREVER
    process = run.start_until("checkpoint", 5, world=world, FAULT=PACE)
    new = run.path / "new.lock"
    new.write_text("process 1 on elsewhere\n")
    with open(new) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        new.rename(run.path / "run.lock")
        assert run.end_of(process) == (LOST if world == 1 else 1)
    assert "another start took this run while this one trained" in the_line(run)
    assert (run.path / "run.lock").read_text() == "process 1 on elsewhere\n"
    assert (run.events("stop"), run.status()["state"]) == ([], "running")
    assert run.saved() == [event["step"] for event in run.events("checkpoint")][-len(run.saved()) :]


@pytest.mark.parametrize(
    ("how", "world"), [("moved", 1), ("moved", 2), ("deleted", 1), ("replaced", 1)]
)
def test_row_36_a_folder_that_goes_is_one_line(how, world, run):
    """At the next step, not at the next save; nothing is made anew in its place."""
    run.flags = ("--checkpoint_freq=20", "--eval_freq=0", "--max_steps=100000")
    process = run.start_until("step", 3, world=world, FAULT=PACE)
    away = run.folder / "away"
    run.path.rename(away)
    if how == "replaced":
        run.path.mkdir()
    if how == "deleted":
        shutil.rmtree(away)
    assert run.end_of(process) == (LOST if world == 1 else 1)
    assert f"{run.path}: moved or deleted while training" in the_line(run)
    assert not run.path.exists() or list(run.path.iterdir()) == []
    if how == "deleted":
        return
    if how == "replaced":
        run.path.rmdir()
    away.rename(run.path)
    assert run.saved() == [], "it did not wait for the save of step 20"
    assert run.resume("--resume=auto", "--stop_after_steps=20", world=world) == 0, run.errors()
    assert run.saved() == [20]


@pytest.mark.parametrize("world", [1, 2])
def test_row_37_a_stopped_run_goes_on(world, run, reference, tmp_path):
    """SIGSTOP, as Ctrl+Z, for longer than --hang_seconds; in a step that goes on for a while afterwards."""
    lasts = "for _ in range(75 if calls == 12 else 0):\n    time.sleep(0.02)"
    program = program_before(tmp_path, "gpt2lab.training.steps", "train_step", lasts)
    process = run.start("--hang_seconds=5", world=world, program=program, FAULT=PACE)
    run.wait_for(process, "step", 11)
    ids = [process.pid, *run.workers(process).values()]
    for signal_number, seconds in ((signal.SIGSTOP, 7), (signal.SIGCONT, 0)):
        for process_id in ids:
            os.kill(process_id, signal_number)
        time.sleep(seconds)
    assert run.end_of(process) == 0, run.errors()
    run.assert_equals(reference(world))


LATER = ("--checkpoint_freq=20", "--eval_freq=0", f"--max_steps={STEPS}")


@pytest.fixture
def own(run, tmp_path) -> FaultRun:
    """Return a run over a copy of the data that may be spoilt, with the hash of each shard."""
    run.data = Path(shutil.copytree(run.data, tmp_path / "own"))
    import_folder(run.data, ImportOptions(tokenizer="unknown"))
    run.flags = LATER
    return run


def shard(run: FaultRun) -> Path:
    return run.data / "tiny_train_000001.npy"


def edit(run: FaultRun) -> None:
    """Change one id in the place where it is, beyond what the next steps read."""
    with open(shard(run), "rb+") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x07\x00" if shard(run).read_bytes()[-2:] != b"\x07\x00" else b"\x08\x00")


def replace(run: FaultRun) -> None:
    """Put another file of the same size into its place, and keep its time."""
    whole, times = shard(run).read_bytes(), shard(run).stat()
    other = run.data / ".other"
    other.write_bytes(whole[:-2] + (b"\x07\x00" if whole[-2:] != b"\x07\x00" else b"\x08\x00"))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(shard(run))


def truncate(run: FaultRun) -> None:
    """Cut every training shard short: a memory map of one would end the process with SIGBUS."""
    for path in run.data.glob("tiny_train_*"):
        os.truncate(path, 200)


@pytest.mark.parametrize(
    ("change", "world"), [(edit, 1), (edit, 2), (replace, 1), (truncate, 1), (truncate, 2)]
)
def test_row_38_no_checkpoint_rests_on_a_shard_that_changed(change, world, own, reference):
    """It was hashed long ago, and would have passed; with the data as it was, the run goes on."""
    kept = Path(shutil.copytree(own.data, own.data.with_name("kept")))
    process = own.start(world=world, FAULT=PACE)
    own.wait_for(process, "checkpoint", 20)
    change(own)
    assert own.end_of(process) == (2 if world == 1 else 1), own.errors()
    why = "" if change is truncate else "its sha256 is not the one in shards.json)"
    assert f"changed while training ({why}" in the_line(own)
    assert str(own.data / "tiny_train_00000") in the_line(own)
    assert own.saved() == [20]
    assert (own.status()["state"], own.status()["exit_code"]) == ("failed", 2)
    shutil.rmtree(own.data)
    kept.rename(own.data)
    own.resumes_as(reference(world), world=world)


def test_row_38_shards_without_a_hash_are_no_longer_believed_once_they_change(run, tmp_path):
    run.data = Path(shutil.copytree(run.data, tmp_path / "own"))
    run.flags = LATER
    process = run.start_until("checkpoint", 20, FAULT=PACE)
    edit(run)
    assert run.end_of(process) == 2
    assert "changed while training, and there is no shards.json to compare it with" in the_line(run)
    assert run.saved() == [20]


def test_row_38_shards_written_again_or_moved_away_end_nothing(own, reference):
    """Their bytes are what they were: that is hashed again, or was read before."""
    process = own.start(FAULT=PACE)
    own.wait_for(process, "step", 5)
    for path in own.data.glob("tiny_train_*"):
        path.with_name(".again").write_bytes(path.read_bytes())
        path.with_name(".again").rename(path)
    own.wait_for(process, "checkpoint", 20)
    own.data.rename(own.data.with_name("away"))
    assert own.end_of(process) == 0, own.errors()
    own.assert_equals(reference(1))


@pytest.mark.parametrize("asked", ["torch.empty(1 << 30)", "bytearray(1 << 32)"])
def test_row_39_memory_of_a_cpu_that_is_used_up_is_one_line(asked, run, tmp_path):
    """A limit of the system, as `ulimit -v` sets it; torch and Python say it with other errors."""
    takes = (
        "if calls == 15:\n    import resource, torch\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)\n    {asked}"
    )
    program = program_before(tmp_path, "gpt2lab.training.steps", "train_step", takes)
    assert run.train(program=program) == 1
    assert the_line(run).startswith("error: out of memory: ")
    assert "A lower --mini_batch_size needs less" in the_line(run)
    assert run.saved() == [5, 10, 14], "the last complete step is saved"
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 1)
