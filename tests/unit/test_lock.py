"""requirements.lock holds what requirements.txt pins, and names no place to fetch it from."""

from __future__ import annotations

import re

from launch import REPOSITORY


def pins_of(name: str) -> set[tuple[str, str]]:
    """Return (package, version) of each line, names spelled as PEP 503 does."""
    lines = (REPOSITORY / name).read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([\w.+]+)", line) for line in lines)
    return {(re.sub(r"[-_.]+", "-", m[1]).lower(), m[2]) for m in found if m}


def test_the_lock_has_every_pin_and_many_more():
    wanted, locked = pins_of("requirements.txt"), pins_of("requirements.lock")
    assert len(wanted) > 15
    assert wanted <= locked
    assert len(locked) > 3 * len(wanted)
    assert "://" not in (REPOSITORY / "requirements.lock").read_text()
