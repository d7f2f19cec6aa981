"""TensorBoard files, a copy of metrics.jsonl: their tags, what --use_tensorboard writes, and their rebuilding.

No torch at the top.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab.config.derived import is_due
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import ConfigError, SaveError, system_errors_as
from gpt2lab.files import temporary_folder
from gpt2lab.runs import history
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.folder import RunFolder
from gpt2lab.training.extension import Extension, LiveRun

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

_BINS = 64  # of a histogram, of equal width
_RESULTS = ("Loss/train", "Loss/validation", "Evaluation/hellaswag_accuracy")  # of the HPARAMS tab
# event -> {field: (TensorBoard tag, factor)}
_SCALARS: dict[str, dict[str, tuple[str, float]]] = {
    "step": {
        "loss": ("Loss/train", 1.0),
        "lr": ("Learning_Rate/lr", 1.0),
        "muon_lr": ("Learning_Rate/muon_lr", 1.0),
        "grad_norm": ("Gradient/norm", 1.0),
        "step_seconds": ("Performance/step_time_ms", 1000.0),
        "tokens_per_second": ("Performance/tokens_per_sec", 1.0),
        "epoch": ("Training/epoch", 1.0),
        "elapsed_seconds": ("training/elapsed_hours", 1 / 3600),
        "remaining_seconds": ("training/remaining_hours", 1 / 3600),
        "on_track": ("training/on_track", 1.0),
    },
    "eval": {"val_loss": ("Loss/validation", 1.0)},
    "hellaswag": {
        "acc_norm": ("Evaluation/hellaswag_accuracy", 1.0),
        "acc_token_norm": ("Evaluation/hellaswag_token_accuracy", 1.0),
    },
    "core": {"centered": ("Evaluation/core", 1.0)},
}
# event -> {field that maps each source of a mixture to a number: TensorBoard tag above its name}
_BY_SOURCE: dict[str, dict[str, str]] = {
    "step": {"epochs_by_source": "Training/epoch"},
    "eval": {"val_loss_by_source": "Loss/validation"},
}


def tags_of(event: Mapping[str, Any]) -> dict[str, float | str]:
    """Return an event's numbers, and a sample's text, by the tags of TensorBoard and W&B."""
    tags: dict[str, float | str] = {
        tag: event[name] * factor
        for name, (tag, factor) in _SCALARS.get(event["event"], {}).items()
        if event.get(name) is not None
    }
    for name, tag in _BY_SOURCE.get(event["event"], {}).items():
        found = (event.get(name) or {}).items()
        tags |= {f"{tag}/{source}": value for source, value in found if value is not None}
    if event["event"] == "sample" and event.get("text") is not None:
        tags["Generated_Samples/text"] = event["text"]
    return tags


class TensorBoard(Extension):
    """Writes the numbers of events, and with --histogram_freq all weights and gradients, to TensorBoard's files."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def started(self, run: LiveRun) -> None:
        """Open the files; events after the step resumed from, or rewound to, are replaced."""
        self._run, self._freq = run, run.start.config.log.histogram_freq
        self._last_step = run.start.plan.max_steps
        if not run.start.config.log.use_tensorboard:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            fix = "pip install -r requirements.txt"
            print(f"warning: no TensorBoard files: {error}; {fix}", file=sys.stderr)
            return
        after, folder = run.components.state.step, run.start.run_dir / "tensorboard"
        is_first = after == 0 or not folder.exists()  # of a branch, or turned on by a resume
        self._writer = SummaryWriter(str(folder), purge_step=after + 1)
        if is_first:
            _mirror_settings(self._writer, to_flat(run.start.config))

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Write an event's numbers and texts under their tags."""
        if self._writer is None:
            return
        try:
            if event["event"] == "rewind":
                self._writer.close()
                again, folder = type(self._writer), self._writer.log_dir
                self._writer = again(folder, purge_step=event["step"] + 1)
            mirror(self._writer, event)
            if event["event"] == "step":
                weights = self._run.components.model.named_parameters()
                self._histograms("Parameters", event["step"], weights)
        except OSError as error:
            self._writer = None
            raise OSError(
                f"no more TensorBoard files ({error.strerror or error}); "
                f"gpt2lab runs rebuild-tensorboard makes them again"
            ) from error

    def updating(self, step: int) -> None:
        """Record the gradients of an update, clipped, if that is due."""
        weights = self._run.components.model.named_parameters()
        gradients = ((name, p.grad) for name, p in weights if p.grad is not None)
        self._histograms("Gradients", step, gradients)

    def _histograms(
        self, kind: str, step: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        if self._writer is None or not self._freq or not is_due(step, self._freq, self._last_step):
            return
        for name, tensor in tensors:
            values = tensor.detach().float().cpu()
            if values.isfinite().all():  # others have no range
                self._writer.add_histogram(f"{kind}/{name}", values, step, bins=_BINS)

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


def mirror(writer: SummaryWriter, event: Mapping[str, Any], when: float | None = None) -> None:
    """Write an event's numbers and texts under their TensorBoard tags; `when` in Unix seconds, default now."""
    for tag, value in tags_of(event).items():
        write = writer.add_text if isinstance(value, str) else writer.add_scalar
        write(tag, value, event["step"], walltime=when)


def _mirror_settings(writer: SummaryWriter, hparams: dict[str, Any]) -> None:
    """Write the settings of a run as a table of text, and for the HPARAMS tab, which compares runs."""
    from torch.utils.tensorboard.summary import hparams as summaries

    plain = {name: _as_cell(value) for name, value in hparams.items()}
    # add_hparams would make a run of its own beside this one.
    into: Any = writer._get_file_writer()  # type: ignore[no-untyped-call]
    for summary in summaries(plain, dict.fromkeys(_RESULTS, 0.0)):  # type: ignore[no-untyped-call]
        into.add_summary(summary)
    rows = "\n".join(f"| {name} | {value} |" for name, value in hparams.items())
    writer.add_text("hparams", f"| setting | value |\n|---|---|\n{rows}", 0)


def _as_cell(value: Any) -> Any:
    """Return a setting as the HPARAMS tab takes it: a number, a truth value or text."""
    return "-" if value is None else " ".join(value) if isinstance(value, list) else value


def rebuild_tensorboard(run_dir: Path) -> tuple[Path, int]:
    """Replace a run's TensorBoard files by those of metrics.jsonl; return their folder and the number of events.

    Only the steps that led to the newest weights are shown, each event at the time it happened.

    Raises: ConfigError if the run is being trained or has no metrics, GPT2LabError if they are damaged, SaveError.
    """
    if not (run_dir / METRICS).exists():
        raise ConfigError(f"{run_dir}: no {METRICS}; not the folder of a run")
    config = history.read_config(run_dir)
    with contextlib.closing(RunFolder(run_dir)):  # rejected while a trainer writes there
        log = history.read_log(run_dir)
        from torch.utils.tensorboard import SummaryWriter

        folder, count = run_dir / "tensorboard", 0
        with system_errors_as(SaveError, folder), temporary_folder(folder) as fresh:
            writer = SummaryWriter(str(fresh))
            _mirror_settings(writer, to_flat(config))
            others = map(log.current, ("eval", "hellaswag", "core", "sample"))
            in_order = (found[step] for found in others for step in sorted(found))
            for event in itertools.chain(log.current_steps(), in_order):
                mirror(writer, event, when=event["time"])
                count += 1
            writer.close()
            old = run_dir / f".del-tensorboard-{uuid.uuid4().hex[:8]}"
            if folder.exists():
                os.rename(folder, old)
            os.rename(fresh, folder)
            shutil.rmtree(old, ignore_errors=True)
    return folder, count
