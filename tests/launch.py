"""Start the trainer as users do, and read back what it did."""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpt2lab.training.stop import STOP_SIGNALS
from plain_log import current_events, read_events
from ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = REPOSITORY / "src" / "train.py"
MAIN = REPOSITORY / "src" / "gpt2lab" / "__main__.py"
SCRIPTS = REPOSITORY / "scripts"
WORKERS = REPOSITORY / "tests" / "workers"
HANG_SECONDS = 1000  # a hung process group must fail its test, not the suite; the slowest takes 150 s when quiet
TO_ITS_END: dict[str, Any] = {"capture_output": True, "text": True, "timeout": HANG_SECONDS}


def slow(*cases: Any) -> list[Any]:
    """Mark cases of a parametrized test as slow; a tuple holds several values."""
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*values, marks=pytest.mark.slow) for values in each]


class Done(NamedTuple):
    """What a program that ended leaves: exit code, stdout, stderr."""

    returncode: int
    stdout: str
    stderr: str


def worked(done: Any) -> Any:
    """Return what a program left, which must have ended well."""
    assert done.returncode == 0, done.stderr
    return done


def rejected(done: tuple[Any, ...]) -> str:
    """Return the one line of a program that rejected its words, as `call` or `ask` returned it."""
    assert done[0] == 2, done
    assert not any(done[1:-1]), done
    (line,) = done[-1].splitlines()
    return str(line)


def call(program: Path | str, *argv: object, folder: Path | None = None, stdin: str = "") -> Done:
    """Run a program in this process: the same errors and exit codes.

    A name is that of a script, or a verb of `gpt2lab`. What needs a process of its own (torch's threads, signals,
    ranks) uses `train`.
    """
    verb = [] if str(program).endswith(".py") else str(program).split()
    path = MAIN if verb else SCRIPTS / program
    name = "gpt2lab" if verb else str(path)
    # Streams as a program has them: with an encoding, and bytes beneath.
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    here, handlers = Path.cwd(), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.MonkeyPatch.context() as patch:
        if not verb:
            patch.syspath_prepend(str(path.parent))
        patch.setattr(sys, "argv", [name, *verb, *map(str, argv)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        if folder is not None:
            patch.chdir(folder)
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            runpy.run_path(str(path), run_name="__main__")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert Path.cwd() == here
    said, stderr = (stream.buffer.getvalue().decode() for stream in (out, err))
    return Done(int(end.value.code or 0), said, without_progress(stderr))


def ask(program: Path | str, *argv: object, folder: Path, stdin: str = "") -> Any:
    """Call a program over `folder`'s runs; return its JSON or text, or its exit code and its one line."""
    done = call(program, *argv, "--checkpoint_dir=runs", folder=folder, stdin=stdin)
    if done.returncode:
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return done.returncode, line
    return json.loads(done.stdout) if "--json" in argv else done.stdout


def python(*words: object, folder: Path = REPOSITORY, **extra: str) -> Done:
    """Run Python with some words, and with our sources, to its end."""
    env = environment(**{"PYTHONPATH": str(REPOSITORY / "src"), **extra})
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, **TO_ITS_END)
    return Done(done.returncode, done.stdout, without_progress(done.stderr))


def without_progress(stderr: str) -> str:
    """Drop the lines that a program prints where it is silent for 4 seconds, as on a busy machine."""
    return re.sub(r"^.*: (.* of .* left|.*\d s so far)\n", "", stderr, flags=re.M)


def words_of(name: Path | str) -> list[str]:
    """Return the words that start a script, or a verb of `gpt2lab`, as its own program."""
    if str(name).endswith(".py"):
        return [sys.executable, str(SCRIPTS / name)]
    return [sys.executable, str(MAIN), *str(name).split()]


def script(name: str, *words: object, **extra: str) -> Done:
    """Run a script or a verb as its own program."""
    return python(*words_of(name)[1:], *words, **extra)


def write_program(path: Path, text: str) -> Path:
    """Write a script that can be started, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


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
    """Run the trainer to its end, as users start it."""
    command = command_for(program, flags, world=world)
    done = subprocess.run(command, env=environment(**extra), **TO_ITS_END)
    done.stderr = without_progress(done.stderr)
    return done


def train_in_forks(
    flags: list[str], *, world: int = 1, program: Path = TRAIN, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run the trainer to its end without the seconds that each process takes to import torch: see ranks.py."""
    how = {"environment": environment(**extra), "seconds": HANG_SECONDS}
    done = run_ranks(program, flags, world=world, **how)
    done.stderr = without_progress(done.stderr)
    return done


def start(
    flags: list[str], *, world: int = 1, stdout: int = subprocess.DEVNULL, **extra: str
) -> subprocess.Popen[str]:
    """Start the trainer and return at once."""
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    command = command_for(TRAIN, flags, world=world)
    return subprocess.Popen(command, env=environment(**extra), start_new_session=True, **pipes)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the complete lines of one kind in metrics.jsonl, in order of writing, without their checksums."""
    return [event for event in all_events(run_dir) if event["event"] == kind]


def last(run_dir: Path, kind: str) -> dict[str, Any]:
    """Return the last complete line of one kind in metrics.jsonl."""
    return events(run_dir, kind)[-1]


def all_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return all complete lines of metrics.jsonl without their checksums."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [json.loads(line) for line in lines]
    for event in found:
        event.pop("crc", None)
    return found


def edit_step(run_dir: Path, step: int, **values: Any) -> None:
    """Change the logged event of a step."""
    found = all_events(run_dir)
    for event in found:
        if (event["event"], event["step"]) == ("step", step):
            event |= values
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))


def append(run_dir: Path, **event: object) -> None:
    """Log one more event of a run: of the fourth step of its second start, unless it says otherwise."""
    line = {"event": "warning", "time": 1.0, "attempt": 2, "step": 4} | event
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return {step: its event}, of the highest attempt."""
    return {event["step"]: event for event in events(run_dir, "step")}


def current_steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return {step: its event} along the line of steps that the newest weights went through."""
    return current_events(read_events(run_dir), "step")


def losses(run_dir: Path) -> dict[int, str]:
    """Return {step: loss in hex}: equal only if every bit is."""
    return {step: float.hex(event["loss"]) for step, event in steps(run_dir).items()}


def parameter_hash(run_dir: Path, step: int) -> str:
    """Return the sha256 of a checkpoint's model file, as its manifest records it."""
    manifest = json.loads((run_dir / f"step_{step:08d}" / "manifest.json").read_text())
    return str(manifest["files"]["model.safetensors"]["sha256"])


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Wait until the run has logged a step; the log line is the signal, never a sleep's length."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if any(event["step"] >= step for event in events(run_dir, "step")):
            return
        if process.poll() is not None:
            raise AssertionError(f"trainer ended early: {process.communicate()[1]}")
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {HANG_SECONDS} s")
