"""Row 35: random events on one run. `make soak MINUTES=10 SEED=7` for longer, with its table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import launch

pytestmark = pytest.mark.fault

MINUTES = float(os.environ.get("MINUTES", "0.2"))
SEED = os.environ.get("SEED", "1337")


@pytest.mark.timeout(60 * MINUTES * 3 + 300)
def test_row_35_a_run_disturbed_at_random_has_the_bits_of_a_quiet_one(tiny_data, tmp_path):
    soak = Path(__file__).with_name("soak.py")
    command = [sys.executable, str(soak), str(tiny_data), str(tmp_path), str(MINUTES), SEED]
    done = subprocess.run(command, env=launch.environment(), capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
