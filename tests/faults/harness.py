"""Start a real run, wait for its own events, make it fail, resume it, and compare it with one that never failed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launch
from tiny import TINY

STEPS = 40

# One T of 16, eight windows a step: milliseconds each, so that a sleep in the step sets the pace.
SHAPE = (*(*TINY, "--mini_batch_size=1", "--log_freq=1000", "--sample_freq=0", "--run_name=run"),)
PACE = "step:sleep0.03@*"
NO_ROLLING = ("--checkpoint_freq=0", "--eval_freq=0", f"--max_steps={STEPS}")


@dataclass
class FaultRun:
    """A run named `run` below `folder`, started as often as the test likes."""

    data: Path
    folder: Path
    flags: tuple[str, ...] = ("--checkpoint_freq=5", "--eval_freq=0", f"--max_steps={STEPS}")
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def argv(self, *more: str) -> list[str]:
        place = [f"--data_dir={self.data}", f"--checkpoint_dir={self.folder}"]
        return [*SHAPE, *place, *self.flags, *more]

    def start(
        self,
        *more: str,
        world: int = 1,
        torchrun: tuple[str, ...] = (),
        program: Path = launch.TRAIN,
        **env: str,
    ) -> subprocess.Popen[str]:
        """Start it and return at once; what it says goes to the files out.txt and err.txt."""
        command = launch.command_for(program, self.argv(*more), world=world)
        if world > 1:
            place = command.index("--standalone") + 1
            command[place:place] = torchrun
        return self.run_command(command, **env)

    def run_command(
        self, command: list[str], *, said: str = "out.txt", errors: str = "err.txt", **env: str
    ) -> subprocess.Popen[str]:
        """Start any command line of the run and return at once; what it says goes to files of the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (
            open(self.folder / said, "a") as out,
            open(self.folder / errors, "a" if said == errors else "w") as err,
        ):
            how = {"cwd": launch.REPOSITORY, "text": True, "start_new_session": True}
            own = launch.environment(**env)
            process = subprocess.Popen(command, env=own, stdout=out, stderr=err, **how)
        self.processes.append(process)
        return process

    def start_until(self, kind: str, step: int, *more: str, **how: Any) -> subprocess.Popen[str]:
        """Start it, and return once it has recorded an event of the kind at the step or later."""
        process = self.start(*more, **how)
        self.wait_for(process, kind, step)
        return process

    def finish(self, *more: str, world: int = 1, **kwargs: Any) -> int:
        """Run it to its end and return the exit code."""
        return self.end_of(self.start(*more, world=world, **kwargs))

    def train(self, *more: str, world: int = 1, program: Path = launch.TRAIN, **env: str) -> int:
        """Run it to its end as `finish` does, in forks of a process that has imported torch (ranks.py).

        What is neither asked to end nor ended by its launcher needs none.
        """
        done = launch.train_in_forks(self.argv(*more), world=world, program=program, **env)
        with open(self.folder / "out.txt", "a") as out:
            out.write(done.stdout)
        (self.folder / "err.txt").write_text(done.stderr)
        return done.returncode

    def resume(self, *more: str, **how: Any) -> int:
        """Run it to its end from its newest checkpoint, or as it is told."""
        return self.train(*(more or ("--resume=latest",)), **how)

    def end_of(self, process: subprocess.Popen[str], seconds: float = launch.HANG_SECONDS) -> int:
        """Wait for a start to end, and all of its ranks."""
        code = process.wait(timeout=seconds)
        self.assert_no_process_left(process)
        return code

    def stop(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
        """Send a start a signal, wait for its end, and return the exit code."""
        process.send_signal(number)
        return self.end_of(process)

    def errors(self) -> str:
        """Return what the last start wrote to stderr, but for its lines of progress."""
        return launch.without_progress((self.folder / "err.txt").read_text())

    def said(self) -> str:
        """Return what all starts wrote to stdout."""
        return (self.folder / "out.txt").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return launch.events(self.path, kind)

    def wait_for(
        self, process: subprocess.Popen[str], kind: str, step: int, attempt: int = 1
    ) -> None:
        """Wait until this start has recorded an event of the kind at the step or later."""
        self.wait_until(
            process,
            lambda: any(e["step"] >= step and e["attempt"] >= attempt for e in self.events(kind)),
            f"{kind} event of step {step}",
        )

    def wait_until(
        self, process: subprocess.Popen[str], condition: Callable[[], bool], what: str
    ) -> None:
        """Wait for a condition; the run ending first, or nothing happening, is a failure."""
        deadline = time.monotonic() + launch.HANG_SECONDS
        while not condition():
            if process.poll() is not None and not condition():
                raise AssertionError(f"ended ({process.returncode}) before {what}: {self.errors()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {launch.HANG_SECONDS} s: {self.errors()}")
            time.sleep(0.01)

    def status(self) -> dict[str, Any]:
        return json.loads((self.path / "status.json").read_text())

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return {step: event} along the line of steps that the newest weights went through."""
        return launch.current_steps(self.path)

    def losses(self) -> dict[int, str]:
        return {step: float.hex(event["loss"]) for step, event in self.steps().items()}

    def saved(self) -> list[int]:
        """Return the steps on disk under a checkpoint's name."""
        return sorted(int(path.name[5:]) for path in self.path.glob("step_*"))

    def resumes_as(self, reference: "FaultRun", *more: str, world: int = 1, **how: Any) -> None:
        """Resume to the end, which is that of the run that never failed."""
        assert self.resume(*more, world=world, **how) == 0, self.errors()
        self.assert_equals(reference)

    def assert_equals(self, reference: "FaultRun", last: int = STEPS) -> None:
        """Every loss and every parameter: the same bits as the run that never failed."""
        assert self.losses() == reference.losses()
        hashes = [launch.parameter_hash(run.path, last) for run in (self, reference)]
        assert hashes[0] == hashes[1]

    def workers(self, launcher: subprocess.Popen[str]) -> dict[int, int]:
        """Return {rank: process id} of the launcher's workers that still live."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:  # one that has ended has no command line
                environ = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            named = dict(entry.partition(b"=")[::2] for entry in environ)
            ours = str(self.folder).encode() in command and b"RANK" in named
            if ours and int(folder.name) != launcher.pid:
                found[int(named[b"RANK"])] = int(folder.name)
        return found

    def assert_no_process_left(self, launcher: subprocess.Popen[str]) -> None:
        """Wait until every rank has ended by itself; one that stays fails the test."""
        deadline = time.monotonic() + launch.HANG_SECONDS
        while left := self.workers(launcher):
            assert time.monotonic() < deadline, f"still alive: {left}"
            time.sleep(0.05)

    def clean_up(self) -> None:
        """End whatever the test left behind."""
        for process in self.processes:
            for pid in self.workers(process).values():
                os.kill(pid, signal.SIGKILL)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def python_program(folder: Path, patch: str) -> Path:
    """Write a trainer whose parts are patched before it starts: what no fault point can do."""
    source = f"""
import sys
sys.path.insert(0, {str(launch.REPOSITORY / "src")!r})
from gpt2lab.training.stop import end_at_once_on
end_at_once_on()
{patch}
from gpt2lab.commands.entry import run
import train
sys.exit(run(train.main))
"""
    path = folder / "patched_train.py"
    path.write_text(source)
    return path


def program_before(folder: Path, owner: str, name: str, lines: str) -> Path:
    """Write a trainer that runs lines before each call of a function of `owner`.

    The lines know the call's `args`, how many `calls` there were with this one, and the process's `rank`.
    """
    patch = f"""
import os, pkgutil, signal, time
owner, calls, rank = pkgutil.resolve_name({owner!r}), 0, int(os.environ.get("RANK", 0))
plain = getattr(owner, {name!r})
def before(*args, **options):
    global calls
    calls += 1
{textwrap.indent(lines, "    ")}
    return plain(*args, **options)
setattr(owner, {name!r}, before)
"""
    return python_program(folder, patch)


if sys.platform != "linux":
    raise RuntimeError("the fault matrix reads /proc")
