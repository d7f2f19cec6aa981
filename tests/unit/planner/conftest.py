"""What the tests of forecasts share."""

import pytest

from gpt2lab.planner import hardware


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch, tmp_path):
    """Let the shipped table of hardware be all that is known."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    hardware.load.cache_clear()
