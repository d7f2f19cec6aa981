"""Rows 35, 46, 47 and 50: random events, what the system refuses, power cuts. `make` has a target for more of each.

`CASES=200 SEED=7 pytest THIS_FILE -m fault -s` draws other ones.
"""

import os
import subprocess
import sys
from pathlib import Path

import disk
import pytest

import launch

CASES = os.environ.get("CASES", "30")  # or `all`
SEED = os.environ.get("SEED", "1337")
SECONDS = 3 * 3600 if CASES == "all" else 300 + 10 * int(CASES)
MINUTES = os.environ.get("MINUTES", "0.2")
pytestmark = [pytest.mark.fault, pytest.mark.timeout(SECONDS)]


def run_all(program: str, folder: Path, cases: str = CASES) -> None:
    """Run a program over its cases."""
    if disk.compiler() is None:
        pytest.skip("no C compiler `cc` to build disk_shim.c")
    sample = [] if CASES == "all" else [f"--sample={cases}", "--jobs=1"]
    run(program, str(folder), f"--seed={SEED}", *sample)


def run(program: str, *words: str) -> None:
    """Run a program and assert that it found nothing wrong."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *words]
    done = subprocess.run(command, env=launch.environment(), capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_row_46_any_call_of_the_disk_fails_and_a_resume_has_the_bits_of_a_quiet_run(tmp_path):
    run_all("syscall_sweep.py", tmp_path)


def test_row_47_whatever_a_power_cut_leaves_goes_on_with_the_bits_of_a_quiet_run(tmp_path):
    run_all("power_cut.py", tmp_path)


def test_row_50_a_thread_process_or_allocation_that_is_refused_is_one_line(tmp_path):
    run_all("start_sweep.py", tmp_path, os.environ.get("CASES", "3"))


@pytest.mark.timeout(60 * float(MINUTES) * 3 + 300)
def test_row_35_a_run_disturbed_at_random_has_the_bits_of_a_quiet_one(tiny_data, tmp_path):
    run("soak.py", str(tiny_data), str(tmp_path), MINUTES, SEED)
