"""What is done to single steps of a run."""

import math
from collections.abc import Callable
from typing import Any

import pytest

import gpt2lab.training.steps
from gpt2lab.model.gpt import GPT
from whole_run import S

OnStep = Callable[[int], None]


@pytest.fixture
def on_steps(monkeypatch) -> Callable[[OnStep], None]:
    """Return a function that has something called with each step's number, by its samples, before it is launched."""
    plain = gpt2lab.training.steps.train_step

    def hook(act: OnStep) -> None:
        def step(model: Any, optimizers: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            act(batch.first_sample // S + 1)
            return plain(model, optimizers, batch, *args, **kwargs)

        monkeypatch.setattr(gpt2lab.training.steps, "train_step", step)

    return hook


@pytest.fixture
def spoil(on_steps, monkeypatch) -> Callable[..., OnStep]:
    """Return a function that multiplies the loss of some steps from now on, and returns what does it on each step."""
    plain, now = GPT.forward, [1.0]
    monkeypatch.setattr(GPT, "forward", lambda self, *a: plain(self, *a) * now[0])

    def spoil(*steps: int, factor: float = math.nan) -> OnStep:
        def act(number: int) -> None:
            now[0] = factor if number in steps else 1.0

        on_steps(act)
        return act

    return spoil
