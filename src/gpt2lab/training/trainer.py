"""The loop: step, then whatever is due after it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.state import NOT_FINITE, TrainState
from gpt2lab.config.derived import is_due
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.errors import (
    DataError,
    FolderLostError,
    GPT2LabError,
    PartialUpdateError,
    PeerError,
    is_lost_peer,
)
from gpt2lab.model import rng
from gpt2lab.optim.schedule import lr_at
from gpt2lab.training.components import Components, Session
from gpt2lab.training.evaluator import Evaluator
from gpt2lab.training.health import accepts, is_spike, report_health
from gpt2lab.training.ranks import Stragglers, check_drift
from gpt2lab.training.rewind import rewind
from gpt2lab.training.run_log import Histograms, StepLog
from gpt2lab.training.saver import Saver
from gpt2lab.training.start import Start
from gpt2lab.training.stop import launcher_grace_seconds, more_to_abort
from gpt2lab.training.train_step import StepStats, train_step

_SAVE_BYTES_PER_SECOND = 1e8  # assumed before the first save was measured


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device computes, or has computed."""

    number: int
    batch: GlobalBatch
    lr: float
    stats: StepStats
    began: tuple[float, float]  # seconds: the monotonic clock, this process's processor time


class Trainer:
    """The loop over one run's steps."""

    def __init__(
        self, components: Components, session: Session, *, saver: Saver, evaluator: Evaluator
    ) -> None:
        self.components, self.saver, self.evaluator = components, saver, evaluator
        self.start, self.runtime = components.start, components.runtime
        self.state = components.state
        self.config, self.last_step = self.start.config, self.start.plan.max_steps
        self.loader = components.batches.loader
        self.folder, self.logger, self.control = session.folder, session.logger, session.control
        self.heartbeat, self.progress = session.heartbeat, session.clock.progress
        # A resumed step is on disk; before the first there is nothing to lose.
        self.saved_step = self.first_step = self.state.step
        # Steps that `state` does not include yet: at most two where steps are pipelined.
        self.launched: list[LaunchedStep] = []
        self.is_pipelined = components.host_decides is None
        self.finished_at = (
            0.0,
            0.0,
        )  # the end of the newest step of `state`; clocks as of LaunchedStep.began
        # Held while an update is launched that is not in `launched` yet, and while a checkpoint is written.
        self.busy = threading.Lock()
        self.last_loss: float | None = self.start.recorded.get("step", {}).get("loss")
        save_seconds = self.start.last_save_seconds
        self.progress.record_save(None if saver.is_async else save_seconds, save_seconds)
        self.progress.record_save(None, saver.stop_seconds)
        self.grace, self.told_of_grace = launcher_grace_seconds(os.environ), False
        self.log = StepLog(components, session)
        self.stragglers = Stragglers(self.runtime, self.logger)
        self.histograms = Histograms(
            components.model, self.logger, self.config.log.histogram_freq, self.last_step
        )

    def answer(self, number: int, level: int) -> None:
        """Say at once what a request to stop leads to; called by the thread that hears of signals."""
        phase, step = self.heartbeat.doing
        what = {
            "training": f"finishing step {step}, then saving",
            "measuring": f"cutting the evaluation after step {step} short, then saving",
            "saving": f"finishing the checkpoint of step {step}",
        }.get(phase, f"stopping after step {self.newest_step}, then saving")
        self.logger.say(f"{what}{more_to_abort(number, level)}")

    def fit(self) -> str | None:
        """Train to the last step or to a stop; return the reason of the stop, None at the end.

        Raises: NonFiniteError, SaveError (FolderLostError), DataError, DriftError; PeerError if another rank died.
        """
        self.warn_of_grace()
        self.control.signals.answer = self.answer
        self.heartbeat.rescue, self.heartbeat.is_out_of_time = self.rescue, self.is_out_of_time
        try:
            self.catch_up()
            while True:
                self.loader.reader.verify(self.state.unverified)
                if self.is_last:
                    return self.end()
                with contextlib.closing(self.loader.batches(self.state.samples)) as batches:
                    reason = self.run_steps(batches)
                if reason != "rewind":
                    return reason
        except (GPT2LabError, PartialUpdateError):
            raise
        except Exception as error:
            if (lost := self.check_folder()) is not None:
                raise lost from error
            self.heartbeat.enter("saving", self.state.step)
            saved = self.rescue(patience=self.control.margin_seconds)
            if not is_lost_peer(error):
                raise
            raise PeerError(
                f"another rank of this run died after step {self.state.step}; "
                f"{'that step is saved' if saved else 'it was not saved'}, go on with --resume latest"
            ) from error

    def is_out_of_time(self) -> bool:
        """Tell whether torchrun has asked to stop so long ago that this step should have ended and been saved.

        Over NCCL a step whose peer has died never ends, and torchrun kills the survivors some time after it has asked.
        """
        signals = self.control.signals
        if self.grace is None or signals.level == 0 or self.state.step == self.first_step:
            return False  # the first step may compile, and nothing is lost with it
        waited = time.monotonic() - signals.asked_at
        return waited > max(self.grace / 2, self.control.margin_seconds)

    def run_steps(self, batches: Iterator[GlobalBatch]) -> str | None:
        """Train on batches in order; return why that ended: None at the end, `rewind`, or the reason of a stop."""
        while True:
            self.heartbeat.enter("reading data", self.newest_step + 1)
            batch, error = fetch(batches)
            self.heartbeat.enter("agreeing", self.newest_step + 1)
            # The one moment at which a run may end early.
            request = self.control.agree(error or self.check_folder())
            if isinstance(request.error, FolderLostError):
                raise request.error
            if self.launched and not request.is_quiet:
                self.finish()
            if request.error is not None:
                self.save_step("emergency")
                raise request.error
            if request.stop is not None:
                self.save_step("emergency")
                return self.end_early(request.stop)
            if request.save:
                self.save_step("rolling")
            assert batch is not None
            if not self.launched:
                self.log.announce(batch, self.state.step)
            self.heartbeat.enter("training", self.newest_step + 1)
            with self.log.while_compiling():
                self.launch(batch)
                if len(self.launched) > 1:
                    self.finish()  # the step before, while the device computes this one
                if self.can_launch_next(self.launched[0]):
                    continue
                went_on = self.finish()
            if not went_on:
                return "rewind"
            self.check_drift_if_due()
            self.state = dataclasses.replace(self.state, due=self.due_after_step())
            self.measure()
            self.histograms.parameters(self.state.step)
            self.save_if_due()
            if self.is_last:
                return self.end()
            if self.state.step == self.start.stop_after_steps:
                return self.end_early("stop_after_steps")

    @property
    def newest_step(self) -> int:
        """The number of the step launched last."""
        return self.state.step + len(self.launched)

    @property
    def is_last(self) -> bool:
        """Tell whether the step just done was the run's last."""
        return self.state.step == self.last_step

    # -- one step ------------------------------------------------------------------------------------------------

    def launch(self, batch: GlobalBatch) -> None:
        """Launch the next optimizer step; a GPU may still compute the one before, a CPU computes at once."""
        began = (time.monotonic() - batch.wait_seconds, time.process_time())
        number = self.newest_step + 1
        faultpoint("step", number)
        aside = 0.0  # seconds spent on looking at gradients, which are there before the update only

        def before_update() -> None:
            nonlocal aside
            aside = self.histograms.gradients(number)
            self.busy.acquire()  # until the step is known; for good after an error on the way

        lr, stats = launch_step(
            self.components, number, batch, self.state, before_update=before_update
        )
        began = (began[0] + aside, began[1])
        self.launched.append(LaunchedStep(number, batch, lr, stats, began))
        self.busy.release()

    def finish(self) -> bool:
        """Wait for the step launched first and record it; False if the run went back instead."""
        step, policy = self.launched[0], self.config.optim.on_spike
        step.stats.done.wait()
        if policy == "rewind" and is_spike(step.stats.loss, self.state.recent_losses):
            self.busy.acquire()  # for good after an error on the way
            went_back = self.rewind(step.batch, step.stats.loss)
            if went_back:
                self.launched.clear()
            self.busy.release()
            if went_back:
                return False
        with self.busy:
            spiked = self.record(step)
        report_health(self.state, step.stats, step.batch, self.logger, spiked=spiked)
        self.stragglers.note(
            step.number,
            work_seconds=step.stats.work_seconds,
            wait_seconds=step.batch.wait_seconds,
        )
        self.saver.poll()
        self.saver.report_mirror(self.state.step)
        return True

    def record(self, step: LaunchedStep) -> bool:
        """Advance the state by a step that is complete, and log it; tell whether its loss is a spike."""
        stats, now = step.stats, (time.monotonic(), time.process_time())
        # Until the step before was complete, the device did not compute this one.
        since = map(max, step.began, self.finished_at)
        seconds, cpu_seconds = (end - begin for end, begin in zip(now, since, strict=True))
        spiked = is_spike(stats.loss, self.state.recent_losses)
        self.state = state_after(self.state, step.batch, stats, self.start, seconds=seconds)
        del self.launched[0]
        self.finished_at, self.last_loss = now, stats.loss
        self.progress.record_step(seconds)
        self.progress.record_save(None, self.saver.stop_seconds)  # one may have ended meanwhile
        self.control.margin_seconds = self.stop_seconds(
            assumed_save=self.start.plan.checkpoint_bytes / _SAVE_BYTES_PER_SECOND
        )
        self.log.announce(step.batch, step.number - 1)
        self.log.record(
            self.state, step.batch, stats, lr=step.lr, seconds=seconds, cpu_seconds=cpu_seconds
        )
        return spiked

    def can_launch_next(self, step: LaunchedStep) -> bool:
        """Tell whether the next step is launched before this one is read: nothing is due between them."""
        first = self.first_step + 1  # compiles, and is announced so
        if not self.is_pipelined or self.state.non_finite_in_a_row or step.number == first:
            return False
        config = self.config
        freqs = (
            *(config.eval.eval_freq, config.eval.hellaswag_freq, config.eval.sample_freq),
            *(config.checkpoint.checkpoint_freq, config.system.drift_check_freq),
        )
        return not (
            any(is_due(step.number, freq, self.last_step) for freq in freqs)
            or step.number in (self.last_step, self.start.stop_after_steps)
            or self.epochs_completed(step.batch.first_sample + step.batch.samples) is not None
        )

    def stop_seconds(self, *, assumed_save: float = 0.0) -> float:
        """Return how long a stop may still take; it comes a step later where steps are pipelined."""
        steps = 2 if self.is_pipelined else 1
        return self.progress.stop_seconds(assumed_save=assumed_save, num_steps=steps)

    def rewind(self, batch: GlobalBatch, loss: float) -> bool:
        """Go back before the spike if there is a checkpoint to go to."""
        self.saver.join()
        state = rewind(self.components, self.state, batch, loss, self.logger)
        if state is not None:
            self.state, self.saved_step = state, state.step
        return state is not None

    def check_drift_if_due(self) -> None:
        """Compare the weights of all ranks every so many steps."""
        freq = self.config.system.drift_check_freq
        if freq and self.state.step % freq == 0:
            self.heartbeat.enter("comparing weights", self.state.step)
            check_drift(self.components.model, self.runtime, self.state.step)

    # -- what is due after a step --------------------------------------------------------------------------------

    def is_due(self, freq: int) -> bool:
        """Tell whether something with this frequency happens after the step just done."""
        return is_due(self.state.step, freq, self.last_step)

    def due_after_step(self) -> tuple[str, ...]:
        """Name what is to be measured after the step just done; before the first one that is the validation loss."""
        if self.state.step == 0:
            return ("eval",)
        config = self.config.eval
        freqs = {
            "eval": config.eval_freq,
            "hellaswag": config.hellaswag_freq,
            "sample": config.sample_freq,
        }
        due = [name for name, freq in freqs.items() if self.is_due(freq)]
        return tuple(name for name in due if self.evaluator.is_possible(name))

    def measure(self) -> None:
        """Measure what is due; a request to stop leaves the rest in the state, for the resume."""
        self.heartbeat.enter("measuring", self.state.step)
        for name in self.state.due:
            faultpoint(f"measure.{name}", self.state.step)
            state = self.evaluator.measure(name, self.state)
            if state is None:
                return
            left = tuple(other for other in self.state.due if other != name)
            self.state = dataclasses.replace(state, due=left)

    def catch_up(self) -> None:
        """Do what is due before the first step; on a resume, what the last start left undone after the step it saved.

        The start may have been interrupted before the step's measurements, between them, or between the commit of its
        checkpoint and the labels and the event that belong to it.
        """
        due, recorded = self.due_after_step(), self.start.recorded
        if self.state.step == 0:
            self.state = dataclasses.replace(self.state, due=due)
            return self.measure()
        if self.state.val_loss is None and (known := recorded.get("eval")):
            self.state = self.state.with_val_loss(known["val_loss"])
        # An evaluation may also be due by this start's --eval_freq, or left out by an earlier version.
        owed = {*self.state.due, *(["eval"] if self.state.val_loss is None else [])} - {*recorded}
        left = tuple(name for name in due if name in owed)
        self.state = dataclasses.replace(self.state, due=left)
        self.measure()
        self.saver.complete(self.state, self.labels(), is_recorded="checkpoint" in recorded)
        return None

    def check_folder(self) -> GPT2LabError | None:
        """Return the error of a run's folder that is gone or taken, on rank 0, which holds its lock."""
        try:
            if self.folder is not None and (warning := self.folder.check_lock()) is not None:
                self.logger.warn(warning, self.state.step)
        except FolderLostError as error:
            return error
        return None

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_if_due(self) -> None:
        """Save this step once, whatever the number of reasons, and set its labels."""
        step, epochs = self.state.step, self.epochs_completed(self.state.samples)
        is_best, is_planned_stop = self.state.best_step == step, step == self.start.stop_after_steps
        reasons = {
            "final": self.is_last,
            "rolling": self.is_due(self.config.checkpoint.checkpoint_freq) or is_planned_stop,
            "epoch": epochs is not None,
            "best": is_best,
        }
        kinds = [kind for kind, applies in reasons.items() if applies]
        if not kinds:
            return
        self.save(kinds[0], self.labels(), must_succeed=self.is_last or is_planned_stop)

    def labels(self) -> list[str]:
        """Return the labels of a checkpoint of the step just done."""
        epochs = self.epochs_completed(self.state.samples)
        labels = [f"epoch_{epochs:04d}"] if epochs is not None else []
        return labels + (["best"] if self.state.best_step == self.state.step else [])

    def save_step(self, kind: Literal["rolling", "emergency"]) -> None:
        """Save the step just done, unless that has happened."""
        if self.saved_step == self.state.step:
            self.heartbeat.enter("saving", self.state.step)
            if self.saver.join():
                self.control.note_save()
                return
        is_end = kind == "emergency"
        labels = [f"emergency_{self.state.step:08d}"] if is_end else []
        self.save(kind, labels, must_succeed=is_end)

    def epochs_completed(self, samples: int) -> int | None:
        """Return the complete epochs if the step up to `samples` ended one whose checkpoint is kept, else None."""
        if self.config.checkpoint.epoch_checkpoints == "off" or samples == 0:
            return None
        order = self.loader.order
        before = order.epoch_of(samples - self.start.plan.batch.samples)
        now = order.epoch_of(samples)
        return now if now > before else None

    def save(self, kind: str, labels: list[str], *, must_succeed: bool) -> None:
        """Save this step, and record how long it took.

        Raises: SaveError if it failed and must not.
        """
        self.check_data(may_wait=kind != "emergency")
        self.heartbeat.enter("comparing weights", self.state.step)
        check_drift(self.components.model, self.runtime, self.state.step)  # rank 0 saves for all
        self.heartbeat.enter("saving", self.state.step)
        self.logger.show(f"step {self.state.step}/{self.last_step} | saving")
        with self.busy:  # a second thread must not write the same files
            outcome = self.saver.save(self.state, kind, labels, must_succeed=must_succeed)
        self.control.note_save()  # a failed one too: it is not tried again at every step
        if outcome.is_saved:
            self.saved_step = self.state.step
            self.progress.record_save(outcome.stall_seconds, outcome.stop_seconds)
            if outcome.stop_seconds is not None:  # a save before a stop waits for the writer
                self.heartbeat.expect("saving", outcome.stop_seconds)
            self.warn_of_grace()

    def rescue(self, patience: float = 0.0) -> bool:
        """Save the last complete step without communication; return whether it is on disk.

        The heartbeat's thread calls this too, when this one hangs. It does nothing once an update has begun whose
        state is not known, or while a checkpoint is written. Training does not go on afterwards. `patience`: seconds
        that a step on the device is given to become complete.
        """
        if not self.busy.acquire(blocking=False):
            return False
        until = time.monotonic() + patience
        try:
            while self.launched:
                step = self.launched[0]
                while not step.stats.done.has_passed() and time.monotonic() < until:
                    time.sleep(0.01)
                if not step.stats.done.has_passed():
                    break
                self.record(step)
            if self.saved_step == self.state.step and self.saver.has(self.state.step):
                return True
            unverified = self.loader.reader.unverified()
        except (DataError, RuntimeError):  # RuntimeError: of the device
            return False
        state = dataclasses.replace(self.state, unverified=unverified)
        return self.saver.rescue(state, self.has_begun_update)

    def has_begun_update(self) -> bool:
        """Tell whether the device may have begun the next update: its numbers, copied before it, have arrived."""
        return bool(self.launched) and self.launched[0].stats.numbers.arrived.has_passed()

    def check_data(self, *, may_wait: bool) -> None:
        """Let no checkpoint rest on data that turns out to be damaged.

        A save at the end of a start must not wait for the hashes of hundreds of GB: it names the shards that are left,
        which the resume verifies before its first save.

        Raises: DataError on all ranks, naming a damaged shard.
        """
        reader = self.loader.reader
        names: tuple[str, ...] = ()
        if may_wait:
            self.runtime.on_all_ranks(reader.wait_until_verified)
        else:
            of_ranks = self.runtime.gather(self.runtime.on_all_ranks(reader.unverified))
            names = tuple(sorted(set().union(*of_ranks)))
        self.state = dataclasses.replace(self.state, unverified=names)
        if names:
            self.logger.warn(
                f"{len(names)} shards read so far are not verified yet ({names[0]}, ...); the resume does that first",
                self.state.step,
            )

    def warn_of_grace(self) -> None:
        """Say once if a stop would take longer than the launcher waits before it kills."""
        needed = self.stop_seconds()
        if self.grace is None or self.told_of_grace or needed <= self.grace:
            return
        self.logger.warn(
            f"a clean stop takes about {needed:.0f} s, torchrun kills after {self.grace:.0f} s: the newest checkpoint "
            f"would then be all that is left; start it with --shutdown-timeout {2 * math.ceil(needed)}",
            self.state.step,
        )
        self.told_of_grace = True

    # -- the end -------------------------------------------------------------------------------------------------

    def end_early(self, reason: str) -> str:
        """Record a stop; the step's checkpoint is on disk, except before the first step: nothing is lost there."""
        self.logger.event(
            "stop", self.state.step, reason=reason, checkpoint=self.newest_checkpoint()
        )
        self.logger.say(f"stopped by {reason} after step {self.state.step} of {self.last_step}")
        return reason

    def end(self) -> str | None:
        """Record that the run is complete, unless a request to stop cut short what is due; return its reason then."""
        if self.state.due:
            reason = self.control.agree().stop
            assert reason is not None
            return self.end_early(reason)
        self.saver.require_labels(self.state.step, self.labels())
        faultpoint("end.before_done", self.state.step)
        is_recorded = "done" in self.start.recorded and self.state.step == self.first_step
        if not is_recorded:
            self.logger.event(
                "done",
                self.state.step,
                reason="completed",
                checkpoint=self.newest_checkpoint(),
                loss=self.last_loss,
                val_loss=self.state.val_loss,
                seconds=self.state.train_seconds,
            )
        return None

    def newest_checkpoint(self) -> str | None:
        """Return the path of the run's newest checkpoint."""
        infos, _ = catalog.list_checkpoints(self.start.run_dir)
        return str(infos[-1].path) if infos else None


def launch_step(
    components: Components,
    number: int,
    batch: GlobalBatch,
    state: TrainState,
    *,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[float, StepStats]:
    """Launch update `number` of a run and return its learning rate and results: all that a replay of it must repeat.

    `state`: of the newest step that is known to be complete; recent losses decide what is a spike.
    """
    start = components.start
    optim, seed = start.config.optim, start.config.data.seed
    lr = lr_at(number, optim, max_steps=start.plan.max_steps)

    def accept(loss: float, norm: float) -> bool:
        return accepts(loss, norm, state, optim.on_spike)

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
    )
    return lr, stats


def state_after(
    state: TrainState, batch: GlobalBatch, stats: StepStats, start: Start, *, seconds: float
) -> TrainState:
    """Return the state one step on."""
    reason = "spike" if is_spike(stats.loss, state.recent_losses) else NOT_FINITE
    return state.advance(
        samples=batch.samples,
        tokens=start.plan.batch.tokens,
        seconds=seconds,
        loss=stats.loss,
        skip_reason=None if stats.updated else reason,
    )


def fetch(batches: Iterator[GlobalBatch]) -> tuple[GlobalBatch | None, GPT2LabError | None]:
    """Return the next batch, or the error that this rank met: all ranks must hear of it before any gradient."""
    try:
        return next(batches), None
    except GPT2LabError as error:
        return None, error
