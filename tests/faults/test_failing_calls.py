"""Rows 46, 47 and 50: what the system refuses, and power cuts. A sample; `make` has a target for all of each.

`CASES=200 SEED=7 pytest THIS_FILE -m fault -s` draws other ones.
"""

import os
import subprocess
import sys
from pathlib import Path

import disk
import pytest

import launch

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(disk.compiler() is None, reason="no C compiler `cc` to build disk_shim.c"),
]

CASES = os.environ.get("CASES", "30")  # or `all`
SEED = os.environ.get("SEED", "1337")
SECONDS = 3 * 3600 if CASES == "all" else 300 + 10 * int(CASES)


def run_all(program: str, folder: Path, cases: str = CASES) -> None:
    """Run a program over its cases and assert that it found nothing wrong."""
    path = Path(__file__).with_name(program)
    command = [sys.executable, str(path), str(folder), f"--seed={SEED}"]
    command += [] if CASES == "all" else [f"--sample={cases}", "--jobs=1"]
    done = subprocess.run(command, env=launch.environment(), capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(SECONDS)
def test_row_46_any_call_of_the_disk_fails_and_a_resume_has_the_bits_of_a_quiet_run(tmp_path):
    run_all("syscall_sweep.py", tmp_path)


@pytest.mark.timeout(SECONDS)
def test_row_47_whatever_a_power_cut_leaves_goes_on_with_the_bits_of_a_quiet_run(tmp_path):
    run_all("power_cut.py", tmp_path)


@pytest.mark.timeout(SECONDS)
def test_row_50_a_thread_process_or_allocation_that_is_refused_is_one_line(tmp_path):
    run_all("start_sweep.py", tmp_path, os.environ.get("CASES", "3"))
