"""Memory that is used up is one line and exit code 1 in every command, as it is in training."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2lab.runs import weights
from launch import REPOSITORY, call
from tiny import flags_of, parse, pretrain, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the run `big`; read only."""
    folder = write_inputs(tmp_path_factory.mktemp("memory"), items=20)
    pretrain(parse(flags_of(folder, "big", "--max_steps=2")))
    return folder


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)])
@pytest.mark.parametrize(
    "typed", ["sample.py big --prompt=hello", "evaluate.py big", "export_hf.py big --out=never"]
)
def test_no_room_for_the_weights_is_one_line(typed, allocate, folder, monkeypatch):
    monkeypatch.setattr(weights, "load_weights", lambda target: allocate())
    monkeypatch.setattr("gpt2lab.interop.export.load_weights", lambda target: allocate())
    done = call(*typed.split(), "--checkpoint_dir=runs", folder=folder)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: out of memory: ")
    assert "this command needs more than is free" in line


def test_no_room_for_a_library_is_one_line(folder):
    """A limit so low that torch itself cannot be loaded."""
    program = "import resource, runpy, sys; limit = 300 << 20\n"
    program += "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
    program += "sys.argv = sys.argv[1:]; sys.path.insert(0, 'scripts')\n"
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = ["scripts/sample.py", str(folder / "runs" / "big"), "--prompt=hello"]
    words = [sys.executable, "-c", program, *words]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: out of memory: ")
    assert "Traceback" not in done.stderr
