"""Plant bugs of one line each, and tell which of them the tests notice: `make planted-bugs ARGS="data model"`.

planted_bugs.txt lists them by room: file, text that occurs there once, what replaces it, and the tests that noticed it
last. Where those pass, the tests of the room run. Each bug is planted in a copy of the checkout, never in the checkout
itself, and pytest runs in a fork that has imported torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BUGS = Path(__file__).with_name("planted_bugs.txt")
IMPORTED = ("torch", "torch._dynamo", "safetensors.torch", "pytest")  # by the parent of all forks
SECONDS = 900.0  # for the tests of a room; longer is a hang, which is noticed


@dataclass(frozen=True)
class Bug:
    """Text that occurs once in a file of the package, and what it is replaced by."""

    file: Path
    before: str
    after: str
    tests: tuple[str, ...]

    def plant(self, source: str) -> str:
        """Return the file's content with the bug."""
        assert source.count(self.before) == 1, f"not once in {self.file}: {self.before}"
        return source.replace(self.before, self.after)


def read_bugs(text: str) -> dict[str, tuple[list[str], list[Bug]]]:
    """Return the tests and the bugs of each room."""
    rooms: dict[str, tuple[list[str], list[Bug]]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            room, _, tests = line[1:].partition("]")
            rooms[room] = tests.split(), []
        elif line and not line.startswith("#"):
            change, _, noticed_by = line.partition(" @ ")
            file, _, change = change.partition(": ")
            before, _, after = change.partition(" ==> ")
            path = Path("src/gpt2lab", file)
            rooms[room][1].append(Bug(path, before, after, tuple(noticed_by.split())))
    return rooms


def first_failure(tests: list[str], folder: Path) -> str | None:
    """Run tests in a fork; return the first that fails, or that they do not end; None if all pass or there are none."""
    if not tests:
        return None
    log = folder / "log"
    if (child := os.fork()) == 0:
        import pytest

        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(folder)
        sys.path[:0] = [str(folder / part) for part in ("src", "tests", "")]
        words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
        os._exit(pytest.main(words))
    until = time.monotonic() + SECONDS
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "no end"
        time.sleep(0.05)
    lines = log.read_text(errors="replace").splitlines()
    failed = (line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR")))
    return next(failed, None)


def notice(bug: Bug, tests: list[str], folder: Path) -> str | None:
    """Return the test that fails with a bug and passes without it; None if no test does."""
    path = folder / bug.file
    source = path.read_text()
    path.write_text(bug.plant(source))
    failure = first_failure([*bug.tests], folder) or first_failure(tests, folder)
    path.write_text(source)
    if failure and "::" in failure and first_failure([failure.split(" ", 1)[1]], folder):
        raise RuntimeError(f"{failure} without a bug too")
    return failure


def main() -> int:
    """Plant the bugs of the rooms named on the command line, or all; return 1 if a tenth or more went unseen."""
    rooms, seen, count = read_bugs(BUGS.read_text()), 0, 0
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy = f"git ls-files -z | xargs -0 cp --parents -t {folder}"
        subprocess.run(copy, shell=True, cwd=REPOSITORY, check=True)
        paths = os.pathsep.join(str(folder / part) for part in ("src", "tests", ""))
        os.environ |= {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        for module in IMPORTED:
            importlib.import_module(module)
        for room in sys.argv[1:] or rooms:
            for bug in rooms[room][1]:
                failure = notice(bug, rooms[room][0], folder)
                seen, count = seen + (failure is not None), count + 1
                said = f"{failure or 'NOT NOTICED'} | {bug.file}: {bug.before} -> {bug.after}"
                print(said, flush=True)
    print(f"noticed {seen} of {count}")
    return int(seen <= 0.9 * count)


if __name__ == "__main__":
    sys.exit(main())
