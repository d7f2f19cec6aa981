"""What every entry point does before it imports torch."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import launch
from gpt2lab import SPIN_COUNT_BUSY, WAITING, is_crowded

# Python imports this file at its start: the first import of torch ends the program and shows the environment.
AT_TORCH = """
import os, sys

def show(event, args):
    if event == "import" and args[0] == "torch":
        os.write(1, repr({name: os.environ.get(name) for name in NAMES}).encode())
        os._exit(0)

sys.addaudithook(show)
""".replace("NAMES", repr(WAITING))
SOURCES = launch.REPOSITORY / "src"


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    """Keep every processor busy."""
    command = [sys.executable, "-c", "import os; os.nice(19)\nwhile True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            stack.callback(stack.enter_context(subprocess.Popen(command)).kill)
        yield


def test_a_machine_is_crowded_by_more_threads_than_it_has_processors():
    assert (is_crowded(-(10**6)), is_crowded(10**6)) == (False, True)


LIBRARY = ["-c", "import gpt2lab, torch"]
TUNE = ["--init_from=x", "--instructions=demo"]


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["src/train.py"], {}),
        (["-m", "gpt2lab", "train"], {}),
        (["src/finetune.py", *TUNE], {}),
        (LIBRARY, {}),
        *[(LIBRARY, {name: "7"}) for name in WAITING],
    ],
)
def test_openmps_threads_spin_briefly_on_a_busy_machine(words, typed, tmp_path, busy_machine):
    (tmp_path / "sitecustomize.py").write_text(AT_TORCH)
    path = os.pathsep.join([str(tmp_path), str(SOURCES)])
    others = {name: value for name, value in os.environ.items() if name not in WAITING}
    # A rank begins with torch; a single process resolves its start first.
    environment = {**others, "PYTHONPATH": path, "RANK": "0", **typed}
    how = {"env": environment, "cwd": launch.REPOSITORY, "capture_output": True}
    done = subprocess.run([sys.executable, *words], **how)
    expected = typed or {"GOMP_SPINCOUNT": SPIN_COUNT_BUSY}
    assert done.stdout.decode() == repr({name: expected.get(name) for name in WAITING}), done.stderr
