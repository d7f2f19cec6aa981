"""One contestant in a fresh process: its steps, how long it took to begin, and the memory it needed. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, Step
from gpt2lab import SPIN_COUNT_BUSY
from gpt2lab.errors import CheckError
from gpt2lab.planner.machine import Watch

_INSTRUMENT = Path(__file__).with_name("instrument.py")
_LOOK_SECONDS = 0.1  # between looks at what the contestant has printed
_FIELDS = "clocks.sm,power.draw,temperature.gpu"


@dataclass(frozen=True)
class Weather:
    """What nvidia-smi said, once a second."""

    sm_mhz: float  # median
    watts: float  # median
    celsius: float  # highest


class GpuWatch:
    """Has nvidia-smi write to a file until it is told to stop."""

    def __init__(self, path: Path) -> None:
        """Begin; without nvidia-smi nothing is seen."""
        self._path, self._process = path, None
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
        command = ["nvidia-smi", f"--id={card}", f"--query-gpu={_FIELDS}", "--loop=1"]
        try:
            with open(path, "wb") as file:
                self._process = subprocess.Popen(
                    [*command, "--format=csv,noheader,nounits"],
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                )
        except FileNotFoundError:
            return

    def stop(self) -> Weather | None:
        """End it, and return what it saw; None for nothing."""
        if self._process is None:
            return None
        self._process.kill()
        self._process.wait()
        return read_weather(self._path.read_text(errors="replace"))


def read_weather(text: str) -> Weather | None:
    r"""Return the medians of complete lines of numbers, None without one.

    >>> read_weather("1980, 650.5, 61\n1965, 690.0, 64\n1950, 7")
    Weather(sm_mhz=1972.5, watts=670.25, celsius=64.0)
    """
    rows = []
    for line in text.split("\n")[:-1]:
        try:
            mhz, watts, celsius = map(float, line.split(","))
        except ValueError:  # [N/A], or an error message
            continue
        rows.append((mhz, watts, celsius))
    if not rows:
        return None
    columns = list(zip(*rows, strict=True))
    return Weather(statistics.median(columns[0]), statistics.median(columns[1]), max(columns[2]))


@dataclass(frozen=True)
class Run:
    """What one process of a contestant showed."""

    steps: tuple[Step, ...]  # the warm-up's first
    warmup: int
    start_seconds: float  # from the start of the process to the start of its first step
    peak_rss: int  # bytes resident
    others: float | None  # share of the processor in other hands meanwhile
    gpu: Weather | None = None

    @property
    def timed(self) -> tuple[Step, ...]:
        """The steps after the warm-up."""
        return self.steps[self.warmup :]


def run(contestant: Contestant, *, warmup: int, steps: int, limit_seconds: float) -> Run:
    """Start the contestant, and end it when it has taken `warmup + steps` steps.

    Raises: CheckError with the last line of its output if it does not get there.
    """
    watch = Watch()
    on_gpu = contestant.place.device == "cuda"
    gpu = GpuWatch(contestant.place.folder / "nvidia-smi.csv") if on_gpu else None
    began = time.monotonic()
    process = _start(contestant, [])
    first_seen = 0.0
    try:
        while True:
            found = contestant.read(contestant.place)
            if found and not first_seen:
                first_seen = time.monotonic() - began
            if len(found) >= warmup + steps:
                break
            _check_alive(contestant, process, began, limit_seconds)
            time.sleep(_LOOK_SECONDS)
    finally:
        peak_rss = _end(process)
        weather = gpu.stop() if gpu else None
    return Run(
        steps=tuple(found[: warmup + steps]),
        warmup=warmup,
        start_seconds=max(0.0, first_seen - found[0].seconds),
        peak_rss=peak_rss,
        others=watch.others(),
        gpu=weather,
    )


def end_contestants_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that a killed benchmark leaves no trainer behind."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def measure_inside(contestant: Contestant, what: str, *, limit_seconds: float) -> dict[str, Any]:
    """Run the contestant with instrument.py around it and return what that found: memory, profile, memory+profile.

    Raises: CheckError.
    """
    result = contestant.place.folder / f"{what}.json"
    began = time.monotonic()
    process = _start(contestant, [str(_INSTRUMENT), what, str(result)])
    try:
        while not result.exists():
            _check_alive(contestant, process, began, limit_seconds)
            time.sleep(_LOOK_SECONDS)
    finally:
        _end(process)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _start(contestant: Contestant, before: list[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **contestant.environment,
    }
    # Ours, which our programs set themselves.
    if environment.get("GOMP_SPINCOUNT") == SPIN_COUNT_BUSY:
        del environment["GOMP_SPINCOUNT"]
    with open(contestant.place.output, "wb") as output:
        return subprocess.Popen(
            [sys.executable, *before, *contestant.program],
            cwd=_working_directory(contestant),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=os.setpgrp,  # a group of its own, so that its helpers end with it
        )


def _working_directory(contestant: Contestant) -> Path:
    """Return the copy of a peer's checkout, or the contestant's own folder."""
    place = contestant.place.folder
    copies = [folder for folder in (place / "nanoGPT", place / "predecessor") if folder.is_dir()]
    return copies[0] if copies else place


def _check_alive(
    contestant: Contestant, process: subprocess.Popen[bytes], began: float, limit_seconds: float
) -> None:
    seconds = time.monotonic() - began
    if process.poll() is None and seconds < limit_seconds:
        return
    lines = contestant.place.output.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    if process.poll() is None:
        raise CheckError(
            f"{contestant.name} has not finished in {seconds:.0f} s (--limit_seconds); it said last: {last}"
        )
    raise CheckError(f"{contestant.name} ended by itself: {last}")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill the process with its helpers, and return the peak of its resident memory in bytes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is not None:  # poll() has taken its leave, and the numbers with it
        return 0
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = -signal.SIGKILL
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
