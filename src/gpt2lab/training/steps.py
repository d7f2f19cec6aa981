"""The pipeline of steps: launch an update, wait for it, record it.

A GPU computes one step while the next is launched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.store import NOT_FINITE, OVERFLOW, TrainState
from gpt2lab.config.derived import frequencies, is_due
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.model import rng
from gpt2lab.optim.schedule import lr_at
from gpt2lab.training.components import Components, Session
from gpt2lab.training.health import (
    Crowding,
    Stragglers,
    has_spiked,
    is_spike,
    report_health,
    rewind,
)
from gpt2lab.training.run_log import StepLog
from gpt2lab.training.saver import Saver
from gpt2lab.training.start import Start
from gpt2lab.training.train_step import StepStats, is_finite, train_step

_SAVE_BYTES_PER_SECOND = 1e8  # assumed before the first save was measured


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device computes, or has computed."""

    number: int
    batch: GlobalBatch
    lr: float
    stats: StepStats
    began: tuple[float, float]  # seconds: the monotonic clock, this process's processor time


class StepPipeline:
    """Takes a run's steps in order; `state` includes those that are complete and recorded."""

    def __init__(self, components: Components, session: Session, saver: Saver) -> None:
        self.components, self.start, self.saver = components, components.start, saver
        self.state: TrainState = components.state
        self.config, self.last_step = self.start.config, self.start.plan.max_steps
        self.steps_before = self.state.step  # complete when this start began
        self.logger, self.control = session.logger, session.control
        self.progress, self._updating = session.clock.progress, session.updating
        # Steps that `state` does not include yet: at most two where steps are pipelined.
        self.launched: list[LaunchedStep] = []
        self.is_pipelined = components.host_decides is None
        # The end of the newest step of `state`; clocks as of LaunchedStep.began.
        self._finished_at = (0.0, 0.0)
        # Held while an update is launched that is not in `launched` yet, and while a checkpoint is written.
        self.busy = threading.Lock()
        self.last_loss: float | None = self.start.recorded.get("step", {}).get("loss")
        self.log = StepLog(components, session)
        self._stragglers = Stragglers(components.runtime, self.logger)
        self._crowding = Crowding(components.runtime, self.logger)

    @property
    def newest_step(self) -> int:
        """The number of the step launched last."""
        return self.state.step + len(self.launched)

    def launch(self, batch: GlobalBatch) -> None:
        """Launch the next optimizer step; a GPU may still compute the one before, a CPU computes at once."""
        began = (time.monotonic() - batch.wait_seconds, time.process_time())
        number = self.newest_step + 1
        faultpoint("step", number)
        extension_seconds = 0.0  # not counted as time of the step

        def before_update() -> None:
            nonlocal extension_seconds
            since = time.monotonic()
            self._updating(number)
            extension_seconds = time.monotonic() - since
            self.busy.acquire()  # until the step is known; never released after an error

        lr, stats = launch_step(
            self.components, number, batch, self.state, before_update=before_update
        )
        began = (began[0] + extension_seconds, began[1])
        self.launched.append(LaunchedStep(number, batch, lr, stats, began))
        self.busy.release()

    def can_launch_next(self) -> bool:
        """Tell whether to launch the next step before reading the oldest launched one: nothing is due between them."""
        step, first = self.launched[0], self.steps_before + 1  # the first one compiles
        if not self.is_pipelined or self.state.non_finite_in_a_row or step.number == first:
            return False
        freqs = (*frequencies(self.config).values(), self.config.system.drift_check_freq)
        return not (
            any(is_due(step.number, freq, self.last_step) for freq in freqs)
            or step.number in (self.last_step, self.start.stop_after_steps)
            or self.start.epochs_completed(step.batch.first_sample + step.batch.samples) is not None
        )

    def finish(self) -> bool:
        """Wait for the step launched first and record it; False if the run went back instead."""
        step, policy = self.launched[0], self.config.optim.on_spike
        step.stats.done.wait()
        if policy == "rewind" and is_spike(step.stats.loss, self.state.recent_losses):
            self.busy.acquire()  # never released after an error
            self.saver.join()
            loss = step.stats.loss
            state = rewind(self.components, self.state, step.batch, loss, self.logger)
            if state is not None:
                self.state = state
                self.launched.clear()
            self.busy.release()
            if state is not None:
                return False
        with self.busy:
            spiked = self.record(step)
        report_health(self.state, step.stats, step.batch, self.logger, spiked=spiked)
        self._stragglers.note(
            step.number, work_seconds=step.stats.work_seconds, wait_seconds=step.batch.wait_seconds
        )
        self._crowding.note(step.number)
        self.saver.poll()
        return True

    def record(self, step: LaunchedStep) -> bool:
        """Advance the state by a step that is complete, and log it; tell whether its loss is a spike."""
        stats, now = step.stats, (time.monotonic(), time.process_time())
        # Until the step before was complete, the device did not compute this one.
        since = map(max, step.began, self._finished_at)
        seconds, cpu_seconds = (end - begin for end, begin in zip(now, since, strict=True))
        spiked = has_spiked(stats, self.state.recent_losses)
        self.state = state_after(self.state, step.batch, stats, self.start, seconds=seconds)
        del self.launched[0]
        self._finished_at, self.last_loss = now, stats.loss
        self.progress.record_step(seconds)
        self.control.margin_seconds = self.stop_seconds(
            assumed_save=self.start.plan.checkpoint_bytes / _SAVE_BYTES_PER_SECOND
        )
        self.log.announce(step.batch, step.number - 1)
        self.log.record(
            self.state, step.batch, stats, lr=step.lr, seconds=seconds, cpu_seconds=cpu_seconds
        )
        return spiked

    def stop_seconds(self, *, assumed_save: float = 0.0) -> float:
        """Return how long a stop may still take: where steps are pipelined, one step more.

        `assumed_save`: seconds of a save, used until one was measured.
        """
        steps, save = 2 if self.is_pipelined else 1, self.saver.stop_seconds
        return self.progress.stop_seconds(assumed_save if save is None else save, num_steps=steps)

    def has_begun_update(self) -> bool:
        """Tell whether the device may have begun the next update: its numbers, copied before it, have arrived."""
        return bool(self.launched) and self.launched[0].stats.numbers.arrived.has_passed()

    def record_complete(self, patience: float) -> None:
        """Record the launched steps that the device has completed, or completes in `patience` seconds."""
        until = time.monotonic() + patience
        while self.launched:
            step = self.launched[0]
            while not step.stats.done.has_passed() and time.monotonic() < until:
                time.sleep(0.01)
            if not step.stats.done.has_passed():
                break
            self.record(step)


def launch_step(
    components: Components,
    number: int,
    batch: GlobalBatch,
    state: TrainState,
    *,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[float, StepStats]:
    """Launch update `number` of a run and return its learning rate and results; a replay calls this too.

    `state`: after the newest step that is known to be complete; its recent losses decide what is a spike.
    """
    start = components.start
    optim, seed = start.config.optim, start.config.data.seed
    loss_scale = components.strategy.loss_scale
    if loss_scale is not None and number == state.step + 1:  # else the device knows a newer one
        loss_scale.restore(state.loss_scale)
    lr = lr_at(number, optim, max_steps=start.plan.max_steps)

    def accept(loss: float, norm: float) -> bool:
        is_fine = optim.on_spike == "warn" or not is_spike(loss, state.recent_losses)
        return is_finite(loss, norm) and is_fine

    stats = train_step(
        components.trained,
        components.optimizers,
        batch,
        lr,
        strategy=components.strategy,
        grad_clip=optim.grad_clip,
        seed=rng.fold_seed(seed, number),
        accept=None if components.host_decides is None else accept,
        before_update=before_update,
        after_update=lambda: components.average.update(number),
    )
    return lr, stats


def state_after(
    state: TrainState, batch: GlobalBatch, stats: StepStats, start: Start, *, seconds: float
) -> TrainState:
    """Return the state one step on."""
    reason = "spike" if has_spiked(stats, state.recent_losses) else NOT_FINITE
    return state.advance(
        samples=batch.samples,
        tokens=start.plan.batch.tokens,
        seconds=seconds,
        loss=stats.loss,
        skip_reason=None if stats.updated else OVERFLOW if stats.overflowed else reason,
        loss_scale=stats.loss_scale,
    )
