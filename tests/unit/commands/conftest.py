"""Runs of `ablate` and `ladder` without a process of their own."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2lab.commands import ablate
from gpt2lab.config.command_line import parse
from gpt2lab.errors import GPT2LabError
from gpt2lab.training.pretrain import pretrain


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the trainer in this process instead of one of its own; return the names of the runs so started."""
    names: list[str] = []

    def run_here(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        command = parse(argv[2:])
        names.append(str(command.fresh().checkpoint.run_name))
        try:
            pretrain(command)
        except GPT2LabError as error:
            return subprocess.CompletedProcess(argv, error.exit_code, "", f"error: {error}\n")
        return subprocess.CompletedProcess(argv, 0, "", "")

    module = SimpleNamespace(run=run_here, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(ablate, "subprocess", module)
    return names
