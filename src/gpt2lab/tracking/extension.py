"""What `--use_tensorboard` and `--track` add to a run: they follow its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from gpt2lab.config.derived import is_due
from gpt2lab.config.settings import to_flat
from gpt2lab.tracking.followers import FINISH_SECONDS, TrackerProcess, open_trackers
from gpt2lab.tracking.tensorboard import mirror, open_tensorboard
from gpt2lab.training.extension import Extension, LiveRun

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

_BINS = 64  # of a histogram, of equal width


class TensorBoard(Extension):
    """Writes the numbers of events, and with --histogram_freq all weights and gradients, to TensorBoard's files."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def started(self, run: LiveRun) -> None:
        """Open the files; events after the step resumed from are replaced."""
        self._run, self._freq = run, run.start.config.log.histogram_freq
        self._last_step = run.start.plan.max_steps
        if not run.start.config.log.use_tensorboard:
            return
        self._writer = open_tensorboard(
            run.start.run_dir,
            after_step=run.components.state.step,
            hparams=to_flat(run.start.config),
        )

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Write an event's numbers and texts under their tags."""
        if self._writer is None:
            return
        try:
            mirror(self._writer, event["event"], event["step"], dict(event))
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


class Trackers(Extension):
    """Follows metrics.jsonl with one process for each tracker."""

    def __init__(self) -> None:
        self._processes: list[TrackerProcess] = []

    def started(self, run: LiveRun) -> None:
        """Start the processes."""
        self._run = run
        settings = to_flat(run.start.config)
        names = run.start.config.log.trackers
        self._processes = open_trackers(run.start.run_dir, names, settings=settings)

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Say once of each process that has ended too early."""
        for process in list(self._processes):
            if (problem := process.problem()) is not None:
                self._processes.remove(process)
                self._run.logger.warn(problem, event["step"])

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Let the processes send the rest, for some seconds."""
        for process in self._processes:
            process.end()
        deadline = monotonic() + FINISH_SECONDS
        for process in self._processes:
            if (problem := process.wait(deadline)) is not None:
                self._run.logger.say(f"warning: {problem}")
