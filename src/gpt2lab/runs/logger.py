"""One event in, every place it belongs to out: metrics.jsonl (the truth), console, log.txt, TensorBoard, W&B.

Only the first process has anything to write to; the others hold a Telemetry without a folder. A full disk ends no run:
what metrics.jsonl does not take is kept in memory until it does, and no checkpoint is written before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gpt2lab.checkpoint.catalog import METRICS
from gpt2lab.errors import SaveError
from gpt2lab.runs.tags import tags_of
from gpt2lab.runs.wandb_mirror import WandbMirror, is_installed

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESULTS = ("Loss/train", "Loss/validation", "Evaluation/hellaswag_accuracy")  # by which to compare


@dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's values in bins of equal width from `low` to `high`."""

    low: float
    high: float
    sum: float
    sum_of_squares: float
    counts: tuple[int, ...]


class Telemetry:
    """Where a run's events go."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        attempt: int,
        tensorboard_from: int | None = None,
        hparams: dict[str, Any] | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Open the sinks of `run_dir` (None: no sinks); TensorBoard events after `tensorboard_from` are replaced."""
        self._attempt = attempt
        self._console = True
        self._metrics: FileIO | None = None
        self._held_back = bytearray()  # lines that the disk had no room for
        self._is_full = False
        self._log: IO[str] | None = None
        self._tensorboard: SummaryWriter | None = None
        self._wandb: WandbMirror | None = None
        if run_dir is None:
            return
        _cut_torn_line(run_dir / METRICS)
        self._metrics = FileIO(run_dir / METRICS, "ab")
        self._log = open(  # noqa: SIM115
            run_dir / "log.txt", "a", encoding="utf-8", errors="backslashreplace"
        )
        if tensorboard_from is not None:
            self._tensorboard = _open_tensorboard(
                run_dir, after_step=tensorboard_from, hparams=hparams or {}
            )
        if use_wandb:
            self._wandb = _open_wandb(run_dir, attempt=attempt, settings=hparams or {})

    def event(self, event: str, step: int, /, **fields: Any) -> None:
        """Append one event to metrics.jsonl and mirror its numbers to TensorBoard.

        Raises: SaveError if metrics.jsonl cannot be written for another reason than a full disk.
        """
        if self._metrics is None:
            return
        values = {name: _finite(value) for name, value in fields.items()}
        line = {
            "event": event,
            "time": time.time(),
            "attempt": self._attempt,
            "step": step,
            **values,
        }
        self._held_back += json.dumps(line, allow_nan=False).encode() + b"\n"
        problem = self.catch_up()
        if event == "checkpoint" and not problem:
            # What a checkpoint rests on must not be lost in a power cut that it survives.
            os.fsync(self._metrics.fileno())
        with self._tensorboard_or_none() as tensorboard:
            if tensorboard is not None:
                mirror(tensorboard, event, step, values)
        if self._wandb is not None and (problem := self._wandb.problem()) is not None:
            self._wandb = None
            self.warn(problem, step)

    def catch_up(self) -> str | None:
        """Append to metrics.jsonl what it has not taken yet; say if the disk is too full for it.

        Raises: SaveError for any other error.
        """
        if self._metrics is None:
            return None
        try:
            while self._held_back:
                del self._held_back[: self._metrics.write(self._held_back)]
        except OSError as error:
            problem = f"{self._metrics.name}: {error.strerror}"
            if error.errno not in _FULL:
                raise SaveError(f"{problem}; mend it and resume") from error
            if not self._is_full:
                self.say(
                    f"warning: {problem}; training goes on, and keeps in memory what it records"
                )
            self._is_full = True
            return problem
        if self._is_full:
            self.say(f"{self._metrics.name}: written again, nothing is missing")
        self._is_full = False
        return None

    @contextlib.contextmanager
    def _tensorboard_or_none(self) -> Iterator[SummaryWriter | None]:
        """Lend the writer where there is one; an error of its files ends them and not the run."""
        try:
            yield self._tensorboard
        except OSError as error:
            self._tensorboard = None
            self.say(
                f"warning: no more TensorBoard files ({error.strerror or error}); "
                f"scripts/rebuild_tensorboard.py makes them anew"
            )

    @property
    def takes_histograms(self) -> bool:
        """Tell whether there is a place for histograms."""
        return self._tensorboard is not None

    def histogram(self, tag: str, step: int, found: Histogram) -> None:
        """Write a histogram to TensorBoard, the only place for it."""
        width = (found.high - found.low) / len(found.counts)
        with self._tensorboard_or_none() as tensorboard:
            if tensorboard is None:
                return
            tensorboard.add_histogram_raw(
                tag,
                min=found.low,
                max=found.high,
                num=sum(found.counts),
                sum=found.sum,
                sum_squares=found.sum_of_squares,
                bucket_limits=[found.low + width * (i + 1) for i in range(len(found.counts))],
                bucket_counts=list(found.counts),
                global_step=step,
            )

    def say(self, text: str) -> None:
        """Show text on the console and keep it in log.txt; losing either does not end a run."""
        if self._log is None:
            return
        if self._console:
            try:
                print(text, flush=True)
            except OSError as error:
                if error.errno not in _FULL:  # `... | head`, a closed terminal
                    self._drop_console()
        with contextlib.suppress(OSError):
            self._log.write(text + "\n")
            self._log.flush()

    def _drop_console(self) -> None:
        """Send what is still said to nobody: the interpreter would fail on it when it ends."""
        self._console = False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def warn(self, text: str, step: int) -> None:
        """Show a warning and record it as an event."""
        self.say(f"warning: {text}")
        self.event("warning", step, message=text)

    def close(self) -> None:
        """Flush and close every sink; W&B may take some seconds to send the rest."""
        if self._wandb is not None:
            problem, self._wandb = self._wandb.close(), None
            if problem is not None:
                self.say(f"warning: {problem}")
        with contextlib.suppress(SaveError):
            self.catch_up()
        if self._held_back:
            lost = self._held_back.count(b"\n")
            self.say(f"warning: the last {lost:,} events are not in {METRICS}: its disk is full")
            self._held_back.clear()
        if self._console and self._log is not None:
            try:
                print(end="", flush=True)
            except OSError:
                self._drop_console()
        for sink in (self._metrics, self._log, self._tensorboard):
            if sink is not None:
                with contextlib.suppress(
                    OSError
                ):  # on a full disk; what mattered was flushed before
                    sink.close()
        self._metrics = self._log = self._tensorboard = None


def mirror(
    writer: SummaryWriter, event: str, step: int, values: dict[str, Any], when: float | None = None
) -> None:
    """Write an event's numbers and texts under their TensorBoard tags; `when` in Unix seconds, default now."""
    for tag, value in tags_of(event, values).items():
        if isinstance(value, str):
            writer.add_text(tag, value, step, walltime=when)
        else:
            writer.add_scalar(tag, value, step, walltime=when)


def mirror_settings(writer: SummaryWriter, hparams: dict[str, Any]) -> None:
    """Write the settings of a run as a table of text, and for the HPARAMS tab, which compares runs."""
    from torch.utils.tensorboard.summary import hparams as summaries

    plain = {name: "-" if value is None else value for name, value in hparams.items()}
    # add_hparams would make a run of its own beside this one.
    into: Any = writer._get_file_writer()  # type: ignore[no-untyped-call]
    for summary in summaries(plain, dict.fromkeys(_RESULTS, 0.0)):  # type: ignore[no-untyped-call]
        into.add_summary(summary)
    rows = "\n".join(f"| {name} | {value} |" for name, value in hparams.items())
    writer.add_text("hparams", f"| setting | value |\n|---|---|\n{rows}", 0)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_torn_line(path: Path) -> None:
    """Remove an unterminated last line, left by a writer that was killed."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _open_wandb(run_dir: Path, *, attempt: int, settings: dict[str, Any]) -> WandbMirror | None:
    try:
        if not is_installed():
            raise OSError("it is not installed: pip install wandb")
        return WandbMirror(run_dir, attempt=attempt, settings=settings)
    except OSError as error:
        print(f"warning: no mirror at W&B: {error}", file=sys.stderr)
        return None


def _open_tensorboard(
    run_dir: Path, *, after_step: int, hparams: dict[str, Any]
) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        print(
            f"warning: no TensorBoard files: {error}; pip install -r requirements.txt",
            file=sys.stderr,
        )
        return None
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=after_step + 1)
    if after_step == 0:
        mirror_settings(writer, hparams)
    return writer
