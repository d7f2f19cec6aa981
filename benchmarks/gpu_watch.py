"""Clock, power and temperature of a GPU while something runs on it: a hot card is a slow card. No torch."""

from __future__ import annotations

import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
        return read(self._path.read_text(errors="replace"))


def read(text: str) -> Weather | None:
    r"""Return the medians of complete lines of numbers, None without one.

    >>> read("1980, 650.5, 61\n1965, 690.0, 64\n1950, 7")
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
