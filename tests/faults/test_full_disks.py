"""Rows 42 and 43: the disk of a run becomes read-only, or full, while it trains; a file system of its own plays it."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PACE

pytestmark = pytest.mark.fault

NOT_SAVED = 75
SIZE = "16m"


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True, text=True)


@pytest.fixture
def disk(run) -> Iterator[Path]:
    """Give the run's folder a file system of its own; skip where mounting is not allowed."""
    run.path.mkdir(parents=True)
    try:
        mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", run.path)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not allowed here: {getattr(error, 'stderr', error)}")
    try:
        yield run.path
    finally:
        for process in run.processes:
            process.kill()
        while subprocess.run(["umount", "-l", run.path], capture_output=True).returncode == 0:
            pass  # the second one lies over it


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Mount the folder read-only over itself: what is open for writing forbids a plain remount."""
    mount("--bind", path, path)
    mount("-o", "remount,ro,bind", path)
    yield
    subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def full(path: Path) -> Iterator[None]:
    """Let another file take all the room, as others' files on a disk or in a quota do."""
    subprocess.run(["dd", "if=/dev/zero", f"of={path / 'others'}"], capture_output=True)
    yield
    (path / "others").unlink()


each_fault = pytest.mark.parametrize(
    ("fault", "said"),
    [(read_only, "Read-only file system"), (full, "free on its disk")],
    ids=["row_42_read_only", "row_43_full"],
)


@each_fault
def test_a_disk_that_takes_nothing_for_a_while_costs_nothing(fault, said, run, disk, reference):
    """Saves are missing with a warning each; all else is as it was, and every event is there in the end."""
    process = run.start_until("checkpoint", 10, FAULT=PACE)
    with fault(disk):
        run.wait_until(process, lambda: run.said().count("not saved") >= 2, "two warnings")
    assert run.end_of(process) == 0, run.errors()
    assert said in run.said()
    assert (run.errors(), sorted(run.steps())) == ("", list(range(1, 41)))
    missing = {5, 10, 15, 20, 25, 30, 35, 40} - {e["step"] for e in run.events("checkpoint")}
    assert len(missing) >= 2
    run.assert_equals(reference(1))
    assert list(disk.rglob(".*")) == []


@each_fault
def test_a_disk_that_takes_nothing_more_ends_with_75_and_the_run_goes_on_later(
    fault, said, run, disk, reference
):
    """At a stop, where the disk is read-only, and at the last step, where it is full."""
    process = run.start_until("checkpoint", 10, FAULT=PACE)
    with fault(disk):
        saved = max(run.saved())
        run.wait_until(process, lambda: "not saved" in run.said(), "a warning")
        if fault is read_only:
            process.send_signal(signal.SIGTERM)
        assert run.end_of(process) == NOT_SAVED, run.errors()
        [line] = run.errors().splitlines()
        assert line.startswith("error: ")
        assert said in line
    assert max(run.saved()) == saved
    assert run.resume() == 0, run.errors()
    assert run.events("resume")[-1]["from_step"] == saved
    run.assert_equals(reference(1))
