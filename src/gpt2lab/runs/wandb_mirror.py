"""Weights & Biases as a mirror of metrics.jsonl: a separate process follows the file. No torch.

The trainer starts the process and closes its standard input at the end. No error, hang or exit of the library can
reach a run; at worst the end of the run waits some seconds. wandb's own service process does not isolate like this
(wandb 0.31): with the service stopped, run.log blocks within 400 calls; with it killed, run.log raises.
Each start of a run is a W&B run of its own, in a group with the run's name: a W&B run only goes forward and would drop
the steps that a resume takes again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from gpt2lab import paths
from gpt2lab.checkpoint.catalog import METRICS
from gpt2lab.runs.tensorboard import tags_of

_SOURCE = Path(paths.__file__).parents[1]
_LOG = "wandb.log"
_POLL_SECONDS = 1.0
_FINISH_SECONDS = 30.0  # the longest wait at the end of a run for the rest to be sent


class WandbMirror:
    """The trainer's handle on the process that mirrors one start."""

    def __init__(self, run_dir: Path, *, attempt: int, settings: dict[str, Any]) -> None:
        """Start the process.

        Raises: OSError.
        """
        path = os.pathsep.join(filter(None, [str(_SOURCE), os.environ.get("PYTHONPATH")]))
        self._log = run_dir / _LOG
        arguments = (run_dir, attempt, (run_dir / METRICS).stat().st_size)
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpt2lab.runs.wandb_mirror", *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C and torchrun's signals are for the trainer
            )
        assert self._process.stdin is not None
        self._input: IO[bytes] = self._process.stdin
        with contextlib.suppress(OSError):  # it has ended already: `problem` tells
            self._input.write(json.dumps(settings).encode() + b"\n")
            self._input.flush()

    def problem(self) -> str | None:
        """Return why the process ended too early, None while it lives."""
        if self._process.poll() is None:
            return None
        with contextlib.suppress(OSError):
            self._input.close()
        said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return (
            f"no more events go to W&B, the run continues: {said[-1][:200]} (all of it in {_LOG})"
        )

    def close(self) -> str | None:
        """Wait some seconds for the rest to be sent; return the problem if there is one."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            code = self._process.wait(_FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return (
                f"W&B did not take the rest within {_FINISH_SECONDS:.0f} s and was left; see {_LOG}"
            )
        return self.problem() if code else None


def is_installed() -> bool:
    """Tell whether wandb is installed, without importing it."""
    return importlib.util.find_spec("wandb") is not None


def follow(run_dir: Path, attempt: int, begin: int) -> None:
    """Send what follows byte `begin` of metrics.jsonl, until standard input ends and all is sent."""
    settings = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def wait_for_the_end() -> None:
        os.read(0, 1)  # not sys.stdin: an interpreter that ends while its lock is held aborts
        ended.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    import wandb  # in this process only

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gpt2lab"),
        group=run_dir.name,
        name=f"{run_dir.name} start {attempt}",
        config=settings,
        dir=str(run_dir),
    )
    run.define_metric("training_step")
    run.define_metric("*", step_metric="training_step")
    torn = b""
    with open(run_dir / METRICS, "rb") as file:
        file.seek(begin)
        while True:
            is_last = ended.is_set()  # before reading: then nothing is written after what is read
            *lines, torn = (torn + file.read()).split(b"\n")
            for event in map(json.loads, lines):
                values = tags_of(event["event"], event)
                if values and event["attempt"] == attempt:
                    run.log({"training_step": event["step"], **values})
            if is_last:
                break
            ended.wait(_POLL_SECONDS)
    run.finish()


if __name__ == "__main__":
    follow(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
