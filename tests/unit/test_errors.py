"""One line for an error of the system: what, where, and the fix."""

import errno

import pytest

from gpt2lab.errors import DataError, SaveError, system_errors_as

FULL = OSError(errno.ENOSPC, "No space left on device", "some/file")


@pytest.mark.parametrize(
    ("error", "more", "line"),
    [
        (FULL, {}, "runs/a: No space left on device"),
        (FULL, {"fix": "choose another"}, "runs/a: No space left on device; choose another"),
        (
            FULL,
            {"what": "cannot be written", "fix": "choose another"},
            "runs/a: cannot be written (No space left on device); choose another",
        ),
        (OSError("of a library"), {"what": "not read"}, "runs/a: not read (of a library)"),
    ],
)
def test_a_system_error_names_its_place_its_reason_and_the_fix(error, more, line):
    with pytest.raises(SaveError) as caught, system_errors_as(SaveError, "runs/a", **more):
        raise error
    assert str(caught.value) == line
    assert caught.value.__cause__ is error


def test_other_errors_and_results_pass():
    with pytest.raises(DataError, match="damaged"), system_errors_as(SaveError, "runs/a"):
        raise DataError("damaged")
    with system_errors_as(SaveError, "runs/a"):
        found = 1
    assert found == 1
