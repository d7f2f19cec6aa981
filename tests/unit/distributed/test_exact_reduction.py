"""`--reduce exact`: one order of summation, so the same bits on any number of processes."""

import pytest

from launch import slow
from whole_run import Run

SHAPE = {"total_batch_size": 192, "mini_batch_size": 1, "eval_freq": 0, "max_steps": 20}
EXACT = {**SHAPE, "reduce": "exact"}


@pytest.fixture(scope="module")
def alone(tiny_run) -> Run:
    """Return the plain run of one process: exact reduction promises its very bits."""
    return tiny_run(**SHAPE)


@pytest.mark.parametrize(("world", "mode"), [(1, "ddp"), *slow((4, "ddp"), (2, "zero1"))])
def test_any_number_of_processes_gives_the_bits_of_one(world, mode, alone, tiny_run):
    assert tiny_run(world=world, dropout=0, parallel=mode, **EXACT).bits() == alone.bits()


def test_row_22_elastic_resumes_keep_every_bit(alone, tiny_run):
    """1 -> 2 -> 4 -> 1 processes within one run, and each resume says what it promises."""
    run = tiny_run(stop_after_steps=5, **EXACT)
    for world, stop in ((2, 10), (4, 15), (1, 20)):
        run.train("--resume=latest", world=world, stop_after_steps=stop)
    assert run.bits() == alone.bits()
    assert [event["level"] for event in run.events("resume")] == ["bit-identical"] * 3


def test_without_it_the_bits_differ(alone, tiny_run):
    """Else the tests above would prove nothing."""
    assert tiny_run(world=2, **SHAPE).bits()[1] != alone.bits()[1]
