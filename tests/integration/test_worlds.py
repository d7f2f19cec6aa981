"""The same tokens and the same curve on any number of processes and any cut into micro-batches."""

import pytest

import launch
from whole_run import Run

STEPS = 50
RANKS_AGREE = launch.WORKERS / "ranks_agree.py"


@pytest.fixture(scope="module")
def reference(tiny_run) -> Run:
    """Run one process that takes the whole batch of 8 sequences at once."""
    return tiny_run(max_steps=STEPS, mini_batch_size=8)


@pytest.mark.parametrize(
    ("world", "mini_batch_size", "compile"),
    [(1, 1, "off"), (2, 1, "off"), *launch.slow((2, 4, "off"), (4, 2, "off"), (2, 1, "on"))],
)
def test_ranks_and_cuts_change_no_loss(world, mini_batch_size, compile, reference, tiny_run):
    """Accumulation 8 and 4 (slow: 1, 1, and compiled), against 1; ranks' weights are compared bit by bit on the way."""
    run = tiny_run()
    more = {"max_steps": STEPS, "mini_batch_size": mini_batch_size, "compile": compile}
    program = launch.TRAIN if world == 1 else RANKS_AGREE
    said = run.train(world=world, program=program, **more)
    assert world == 1 or said.count(f"compared {STEPS} steps") == world
    # 1e-5 relative: the order of fp32 sums is all that may differ (design, section 3).
    run.assert_same_curve(reference, STEPS)
    assert run.losses()[STEPS] != run.losses()[1]
