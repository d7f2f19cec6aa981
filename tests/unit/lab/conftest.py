"""Runs of `ablate` and `ladder` without a process of their own."""

from typing import Any

import pytest

from gpt2lab.errors import GPT2LabError
from gpt2lab.lab import seed_runs
from gpt2lab.lab.seed_runs import SeedRun
from tiny import parse, pretrain


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the trainer in this process instead of one of its own; return the names of the runs so started."""
    names: list[str] = []

    def run_here(_: Any, run: SeedRun, *__: Any) -> tuple[int, str]:
        names.append(run.name)
        try:
            pretrain(parse(run.trainer_words()))
        except GPT2LabError as error:
            return error.exit_code, f"error: {error}\n"
        return 0, ""

    monkeypatch.setattr(seed_runs._Trainers, "run", run_here)
    return names
