"""Runs of `ablate` and `ladder` without a process of their own."""

from __future__ import annotations

from typing import Any

import pytest

from gpt2lab.commands import ablate
from gpt2lab.errors import GPT2LabError
from tiny import parse, pretrain


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the trainer in this process instead of one of its own; return the names of the runs so started."""
    names: list[str] = []

    def run_here(_: Any, argv: list[str], *__: Any) -> tuple[int, str]:
        command = parse(argv)
        names.append(str(command.config.checkpoint.run_name))
        try:
            pretrain(command)
        except GPT2LabError as error:
            return error.exit_code, f"error: {error}\n"
        return 0, ""

    monkeypatch.setattr(ablate._Trainers, "run", run_here)
    return names
