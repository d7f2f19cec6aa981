"""Make the metrics.jsonl of a long run: lines like those of a real one, a million of them in seconds.

python tests/long_logs.py RUN_FOLDER 1000000
"""

import hashlib
import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LINES = 20_000  # of the log whose cost is measured
# Bytes: a million lines, 640 MB, cost 100 MB; as dictionaries 3.5 GB.
BUDGET = 100 * LINES + 8 * 2**20
EVERY = 250  # steps between evaluations, and between checkpoints
_STEP = (
    '{"event": "step", "time": %.7f, "attempt": %d, "step": %d, "loss": %.15f, "lr": %.19f, '
    '"grad_norm": 1.0628737211227417, "step_seconds": %.16f, "tokens_per_second": %.14f, '
    '"tokens": %d, "targets": 64, "epoch": %d, "data_wait_seconds": 7.176000508479774e-05, '
    '"mfu": null, "peak_memory_bytes": 338096128, "first_sample": %d, "batch_hash": "%s", '
    '"updated": true, "cpu_seconds": 0.6961140539999997, "elapsed_seconds": %.14f, '
    '"remaining_seconds": %.14f, "on_track": true}\n'
)


def damage_lines(path: Path, *numbers: int) -> bytes:
    """Spoil lines of a log, by number from 1, and return what it was."""
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    for number in numbers:
        lines[number - 1] = lines[number - 1][:40] + b"\n"
    path.write_bytes(b"".join(lines))
    return before


def lines_of_a_start(
    steps: int,
    *,
    attempt: int = 1,
    first: int = 1,
    max_steps: int | None = None,
    tokens_per_step: int = 64,
) -> Iterator[str]:
    """Yield the lines of one start that takes `steps` steps from number `first` on."""

    def line(event: str, step: int, after: float, /, **fields: Any) -> str:
        head = {"event": event, "time": 1.7e9 + after, "attempt": attempt, "step": step}
        return json.dumps(head | fields) + "\n"

    last = max_steps or first + steps - 1
    begun = {"max_steps": last, "tokens_per_step": tokens_per_step, "world_size": 1}
    yield line("begin", first - 1, 0.0, **begun, order_version=2)
    if attempt > 1:
        yield line("resume", first - 1, 0.0, from_step=first - 1, changes={}, level="same data")
    elapsed = 10.0
    for step in range(first, first + steps):
        took = 0.1 + (step * 7919 % 1000) / 50_000
        elapsed += took
        digest = hashlib.sha256(b"%d" % step).hexdigest()
        loss, lr = 2 + 8 / (1 + step / 1e4) + (step * 104729 % 997) / 5e3, 6e-4 * (1 - step / last)
        yield _STEP % (
            *(1.7e9 + elapsed, attempt, step, loss, lr, took),
            *(tokens_per_step / took, tokens_per_step * step),
            *(step // 10_000, 4 * (step - 1), digest, elapsed, (last - step) * 0.11),
        )
        if step % EVERY == 0:
            elapsed += 3.0
            measured = {"val_loss": loss, "val_loss_se": 0.004, "val_tokens": 320}
            yield line("eval", step, elapsed, **measured, bits_per_byte=None, seconds=2.5)
            saved = {"path": f"step_{step:08d}", "kind": "rolling", "labels": [], "bytes": 119_000}
            yield line("checkpoint", step, elapsed, **saved, seconds=0.5)


def write_long_log(run_dir: Path, lines: int, *, tokens_per_step: int = 64) -> Path:
    """Write the log of one start that is half done, with about so many lines; return its path."""
    path = run_dir / "metrics.jsonl"
    steps = (lines - 1) * EVERY // (EVERY + 2)
    with open(path, "w") as file:
        how = {"max_steps": 2 * steps, "tokens_per_step": tokens_per_step}
        file.writelines(lines_of_a_start(steps, **how))
    return path


def long_run_of(run_dir: Path, folder: Path) -> Path:
    """Copy a run and give the copy a log of 13 MB; return its folder."""
    shutil.copytree(run_dir, folder)
    write_long_log(folder, LINES, tokens_per_step=128)
    return folder


def peak_bytes(read: Callable[[Any], object], what: Any) -> int:
    """Return the peak of what Python and numpy allocate while a function reads something, such as a run."""
    tracemalloc.start()
    assert read(what)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    print(write_long_log(Path(sys.argv[1]), int(sys.argv[2])))
