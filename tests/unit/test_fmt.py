"""How numbers are written for people."""

from __future__ import annotations

import pytest

from gpt2lab import fmt


@pytest.mark.parametrize(
    ("number", "text"), [(999_900_000, "1 GB"), (999_400, "999 kB"), (999, "999 B"), (0, "0 B")]
)
def test_sizes_round_into_the_next_unit(number: int, text: str) -> None:
    assert fmt.num_bytes(number) == text


def test_one_step_is_no_range() -> None:
    assert (fmt.steps(9, 9), fmt.steps(9, 12)) == ("step 9", "steps 9 to 12")
