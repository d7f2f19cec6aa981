"""Start the trainer as users do, and read back what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpt2lab.runs import history

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = REPOSITORY / "src" / "train.py"
_SECONDS = 200  # a hung process group must fail its test, not the suite


def command_for(program: Path, flags: list[str], *, world: int) -> list[str]:
    """Return the command line: python alone, or torchrun for more than one process."""
    if world == 1:
        return [sys.executable, str(program), *flags]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc_per_node={world}", str(program), *flags]


def environment(**extra: str) -> dict[str, str]:
    """Return an environment in which every process has one thread, whatever the world."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def train(
    flags: list[str], *, world: int = 1, program: Path = TRAIN, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run the trainer to its end."""
    return subprocess.run(
        command_for(program, flags, world=world),
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )


def start(flags: list[str], *, world: int = 1, **extra: str) -> subprocess.Popen[str]:
    """Start the trainer and return at once."""
    return subprocess.Popen(
        command_for(TRAIN, flags, world=world),
        env=environment(**extra),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the complete lines of one kind in metrics.jsonl, in order of writing."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return {step: its event}, of the highest attempt."""
    return {event["step"]: event for event in events(run_dir, "step")}


def current_steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return {step: its event} along the line of steps that the newest weights went through."""
    return history.current(history.read_events(run_dir), "step")


def losses(run_dir: Path) -> dict[int, str]:
    """Return {step: loss in hex}: equal only if every bit is."""
    return {step: float.hex(event["loss"]) for step, event in steps(run_dir).items()}


def parameter_hash(run_dir: Path, step: int) -> str:
    """Return the sha256 of a checkpoint's model file, as its manifest records it."""
    manifest = json.loads((run_dir / f"step_{step:08d}" / "manifest.json").read_text())
    return str(manifest["files"]["model.safetensors"]["sha256"])


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Wait until the run has logged a step; the log line is the signal, never a sleep's length."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        if any(event["step"] >= step for event in events(run_dir, "step")):
            return
        if process.poll() is not None:
            raise AssertionError(f"trainer ended early: {process.communicate()[1]}")
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {_SECONDS} s")
