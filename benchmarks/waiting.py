"""How OpenMP's threads should wait: tokens/s of small runs by policy, on an idle machine and beside one busy program.

PYTHONPATH=src:. python -m benchmarks.waiting IDS BYTES [--rounds 2]     two folders that `gpt2lab prepare` wrote

Every policy has its turn in every round; a run's figure is the median of its steps, a policy's the median of its runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import WAITING
from gpt2lab.commands import entry
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option

POLICIES: dict[str, dict[str, str]] = {
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "ours": {},
}
# preset, whether by bytes, steps of a run
SIZES = (
    ("gpt2-nano", True, 40),
    ("modern-micro", True, 12),
    ("gpt2-micro", False, 10),
    ("gpt2-mini", False, 3),
)


@dataclass(frozen=True)
class Flags:
    """The data, and how often."""

    ids: Path = argument("tokens of GPT-2")
    bytes: Path = argument("tokens that are bytes")
    rounds: int = option(2, "runs of each policy, size and load")


@contextlib.contextmanager
def _busy_programs(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(model: str, data: Path, steps: int, policy: dict[str, str]) -> float:
    """Return the median tokens/s of the steps of a run, but for the first."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--model={model}", f"--data_dir={data}", f"--stop_after_steps={steps}"]
        flags += [f"--checkpoint_dir={folder}", "--compile=off", "--device=cpu", "--eval_freq=0"]
        flags += ["--sample_freq=0", "--max_steps=1000", "--run_name=r", "--log_freq=1"]
        program = [sys.executable, "-m", "gpt2lab.train", *flags]
        subprocess.run(program, check=True, capture_output=True, env=environment | policy)
        lines = map(json.loads, Path(folder, "r", "metrics.jsonl").read_text().splitlines())
        rates = [line["tokens_per_second"] for line in lines if line["event"] == "step"]
    return statistics.median(rates[1:])


def main(argv: list[str]) -> int:
    """Measure all, and print a line for each size and load."""
    flags = parse_flags(Flags, argv)
    print("| model | busy programs |", " | ".join(POLICIES), "| ours / best |")
    print("| --- |" + " --- |" * (len(POLICIES) + 2))
    for model, by_bytes, steps in SIZES:
        for busy in (0, 1):
            found: dict[str, list[float]] = {name: [] for name in POLICIES}
            with _busy_programs(busy):
                for _ in range(flags.rounds):
                    for name, policy in POLICIES.items():
                        data = flags.bytes if by_bytes else flags.ids
                        found[name].append(measure(model, data, steps, policy))
            rates = {name: statistics.median(each) for name, each in found.items()}
            ratio = rates["ours"] / max(rates.values())
            cells = [f"{rate:,.0f}" for rate in rates.values()]
            print("|", " | ".join([model, str(busy), *cells, f"{ratio:.2f}"]), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))
