"""Extensions observe a run at six moments; they cannot change a number, an order or a decision. No torch.

TensorBoard, trackers, the mirror of checkpoints, the forecast and the losses of tokens are extensions.
`commands/train.py` makes the list. A failure of an extension is one warning, and the run continues without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config, SystemConfig
from gpt2lab.errors import first_line
from gpt2lab.runs.console import say
from gpt2lab.training.plan import Plan
from gpt2lab.training.start import Start

if TYPE_CHECKING:
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.runs.folder import RunFolder
    from gpt2lab.runs.logger import MetricsLogger
    from gpt2lab.training.components import Components
    from gpt2lab.training.stop import Signals


@dataclass(frozen=True)
class LiveRun:
    """A run that has begun, on rank 0."""

    components: Components
    folder: RunFolder
    logger: MetricsLogger
    signals: Signals
    timeout_seconds: float  # for which other ranks wait in a barrier

    @property
    def start(self) -> Start:
        """What this start does."""
        return self.components.start


class Extension:
    """Observes a run, on rank 0; only `resolved` is called on every rank."""

    def requested(self, request: RunRequest) -> None:
        """Called before anything of the run is read.

        Raises: GPT2LabError to reject the start; later errors are warnings.
        """

    def resolved(self, start: Start, runtime: Runtime, signals: Signals) -> None:
        """Called on every rank once it is decided what this start does; no checkpoint is loaded and nothing written."""

    def started(self, run: LiveRun) -> None:
        """Called once the run's folder is locked and its log is open."""

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Called with every event of metrics.jsonl; `result`: what an evaluation measured, None of other events.

        The event `checkpoint` says that one is committed, the event `step` that an update is complete.
        """

    def updating(self, step: int) -> None:
        """Called before update `step`, when its gradients are complete; not counted as time of the step."""

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Called when all but the final status is on disk.

        `reason`: of a stop; None: the run is complete, or `error` ended it.
        """


class Extensions:
    """Several extensions as one: each is left out after its first failure."""

    def __init__(self, extensions: Iterable[Extension]) -> None:
        self._active = list(extensions)
        self._warn: Callable[[str], None] = lambda text: say(f"warning: {text}")

    def resolved(self, start: Start, runtime: Runtime, signals: Signals) -> None:
        """See Extension."""
        self._each(lambda extension: extension.resolved(start, runtime, signals))

    def started(self, run: LiveRun) -> None:
        """See Extension; from here on failures are in the run's log."""
        self._each(lambda extension: extension.started(run))
        self._warn = lambda text: run.logger.warn(text, run.logger.newest_step)

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """See Extension."""
        self._each(lambda extension: extension.recorded(event, result))

    def updating(self, step: int) -> None:
        """See Extension."""
        self._each(lambda extension: extension.updating(step))

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """See Extension; the last one first. An extension that has ended gets no more events."""
        while self._active:
            extension = self._active.pop()
            self._call(extension, lambda extension: extension.ended(reason, error))

    def _each(self, call: Callable[[Extension], None]) -> None:
        for extension in list(self._active):
            if extension in self._active:  # a warning of another may have ended it
                self._call(extension, call)

    def _call(self, extension: Extension, call: Callable[[Extension], None]) -> None:
        try:
            call(extension)
        except Exception as error:
            if extension in self._active:
                self._active.remove(extension)
            name = type(extension).__name__
            self._warn(f"{name} has ended: {type(error).__name__}: {first_line(error)}")


class Planner(Protocol):
    """What the planner answers while a start is resolved; without one, settings are used as they are."""

    memory: Sequence[float | None] | None  # `free_memory` of every rank; None: nothing is measured

    def free_memory(self, system: SystemConfig) -> float | None:
        """Return the bytes that this rank could use, None where unknown."""

    def choose(
        self, request: RunRequest, config: Config, plan: Plan, *, run_dir: Path
    ) -> dict[str, Any]:
        """Return the settings that the planner decides, by their flags; without `memory` nothing is measured for them.

        Raises: ConfigError if the machine, or the card that was asked for, cannot do it.
        """

    def peak_flops(self, device_name: str) -> float | None:
        """Return a GPU's dense bf16 or fp16 peak in FLOP/s, None where it is not known: MFU is n/a then."""
