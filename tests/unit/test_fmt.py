"""How numbers are written for people."""

import pytest

from gpt2lab import fmt


@pytest.mark.parametrize(
    ("number", "text"), [(999_900_000, "1 GB"), (999_400, "999 kB"), (999, "999 B"), (0, "0 B")]
)
def test_sizes_round_into_the_next_unit(number, text):
    assert fmt.num_bytes(number) == text


def test_one_step_is_no_range():
    assert (fmt.steps(9, 9), fmt.steps(9, 12)) == ("step 9", "steps 9 to 12")
    assert (fmt.count(999.4e12), fmt.count(999.7e12)) == ("999T", "1000T")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(18_120.0, "5h 02m"), (59.6, "1m 00s"), (None, "n/a"), (3600 * 1e308, "n/a")],
)
def test_a_span_has_two_units_where_it_is_known(seconds, text):
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"), [("2.5B", 2_500_000_000), ("4_096", 4096), ("1e3", 1000), (".5k", 500)]
)
def test_a_count_has_a_unit_of_thousands(text, count):
    assert fmt.parse_count(text) == count


@pytest.mark.parametrize("text", ["1/0", "6/2", "1e999999999", "1.5", "nan", "-", "", "9" * 50])
def test_what_is_no_whole_number_is_no_count(text):
    with pytest.raises(ValueError, match="whole number"):
        fmt.parse_count(text)


@pytest.mark.parametrize("text", ["nan", "inf", "9" * 400 + "h", "1x", "h", ""])
def test_what_is_not_finite_is_no_time_span(text):
    with pytest.raises(ValueError, match=r"time span|could not convert"):
        fmt.parse_duration(text)
