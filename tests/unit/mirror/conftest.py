"""A run without checkpoints, and an empty bucket on this machine's disk."""

from pathlib import Path

import pytest

from mirrors import new_run


@pytest.fixture
def bucket(tmp_path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return new_run(tmp_path / "runs" / "run")
