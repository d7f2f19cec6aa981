"""One line for an error of the system: what, where, and the fix."""

import errno

import pytest

from gpt2lab.errors import DataError, GPT2LabError, SaveError, system_errors_as

FULL = OSError(errno.ENOSPC, "No space left on device", "some/file")


@pytest.mark.parametrize(
    ("error", "more"),
    [
        *((FULL, {}), (FULL, {"fix": "choose another"})),
        (FULL, {"what": "cannot be written", "fix": "choose another"}),
        (OSError("of a library"), {"what": "not read"}),
    ],
)
def test_a_system_error_names_its_place_its_reason_and_the_fix(error, more, wording):
    named = system_errors_as(DataError, "runs/a", **more)
    with pytest.raises(GPT2LabError, check=wording) as caught, named:
        raise error
    assert type(caught.value) is (SaveError if error is FULL else DataError)
    assert caught.value.__cause__ is error


def test_other_errors_and_results_pass():
    with pytest.raises(DataError, match="damaged"), system_errors_as(SaveError, "runs/a"):
        raise DataError("damaged")
    with system_errors_as(SaveError, "runs/a"):
        found = 1
    assert found == 1
