"""Row 44: the kernel kills a rank because its control group is out of memory."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import NO_ROLLING, PACE, program_before

import launch

pytestmark = pytest.mark.fault

CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 64 << 20


def own_group() -> tuple[Path, str]:
    """Return the folder of this process's control group for memory, and the file of its limit."""
    places = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        places[controllers] = path.lstrip("/")
    if "memory" in places:  # version 1
        return CGROUPS / "memory" / places["memory"], "memory.limit_in_bytes"
    return CGROUPS / places.get("", ""), "memory.max"


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a control group with little memory; skip where that is not allowed."""
    group = None
    try:
        parent, limit = own_group()
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
    command = launch.command_for(program, run.argv(), world=2)
    env = launch.environment(PAUSE="0", FAULT=PACE)
    done = launch.worked(subprocess.run([script, *command], env=env, **launch.TO_ITS_END))
    events = (small_group / name for name in ("memory.oom_control", "memory.events"))
    assert "oom_kill 1" in "".join(path.read_text() for path in events if path.exists())
    assert "another rank of this run died after step 14; that step is saved" in done.stderr
    assert "ended with exit code 1; starting again in 0 s" in done.stderr
    assert [event["from_step"] for event in run.events("resume")] == [14]
    run.assert_equals(reference(2))
