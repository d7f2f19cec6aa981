"""Runs to break, and the runs that never broke."""

import functools
from collections.abc import Callable, Iterator

import pytest
from harness import FaultRun


@pytest.fixture
def run(tiny_data, tmp_path) -> Iterator[FaultRun]:
    """Return a run to break."""
    run = FaultRun(tiny_data, tmp_path / "runs")
    yield run
    run.clean_up()


@pytest.fixture(scope="session")
def reference(tiny_data, tmp_path_factory) -> Callable[[int], FaultRun]:
    """Return a function from a world size to its run of 40 steps that never failed."""

    @functools.cache
    def finished(world: int) -> FaultRun:
        run = FaultRun(tiny_data, tmp_path_factory.mktemp(f"reference{world}"))
        assert run.resume("--resume=auto", world=world) == 0, run.errors()
        return run

    return finished
