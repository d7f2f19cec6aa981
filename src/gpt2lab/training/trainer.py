"""The loop: step, then whatever is due after it."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.derived import frequencies, is_due
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.errors import (
    FolderLostError,
    GPT2LabError,
    PartialUpdateError,
    PeerError,
    is_lost_peer,
)
from gpt2lab.training.components import Components, Session
from gpt2lab.training.evaluator import Evaluator
from gpt2lab.training.health import check_drift
from gpt2lab.training.save_policy import SavePolicy
from gpt2lab.training.saver import Saver
from gpt2lab.training.steps import StepPipeline
from gpt2lab.training.stop import end_at_once, more_to_abort


class Trainer:
    """The loop over one run's steps."""

    def __init__(
        self, components: Components, session: Session, *, saver: Saver, evaluator: Evaluator
    ) -> None:
        self.components, self.saver, self.evaluator = components, saver, evaluator
        self.start, self.runtime = components.start, components.runtime
        self.config, self.last_step = self.start.config, self.start.plan.max_steps
        self.loader = components.batches.loader
        self.folder, self.logger, self.control = session.folder, session.logger, session.control
        self.heartbeat = session.heartbeat
        self.steps = StepPipeline(components, session, saver)
        self.saves = SavePolicy(components, session, saver, self.steps)

    @property
    def state(self) -> TrainState:
        """The state after the newest complete step."""
        return self.steps.state

    @property
    def is_last(self) -> bool:
        """Tell whether the step just done was the run's last."""
        return self.state.step == self.last_step

    def fit(self) -> str | None:
        """Train to the last step or to a stop; return the reason of the stop, None at the end.

        Raises: NonFiniteError, SaveError (FolderLostError), DataError, DriftError; PeerError if another rank died.
        """
        self.saves.warn_of_grace()
        self.control.signals.answer, self.control.signals.ends_at_once = self.answer, False
        self.heartbeat.rescue = self.saves.rescue
        self.heartbeat.is_out_of_time = self.is_out_of_time
        try:
            self.catch_up()
            while True:
                self.loader.reader.verifier.touch_named(self.state.unverified)
                if self.is_last:
                    if self.state.unverified:  # no save follows that would wait for their hashes
                        self.runtime.on_all_ranks(self.loader.reader.verifier.wait)
                    return self.end()
                with contextlib.closing(self.loader.batches(self.state.samples)) as batches:
                    reason = self.run_steps(batches)
                if reason != "rewind":
                    return reason
        except PartialUpdateError as error:
            if not is_lost_peer(error.__cause__ or error):
                raise
            died = f"another rank of this run died in the update after step {self.state.step}"
            raise PeerError(f"{died}; continue with --resume latest") from error
        except GPT2LabError:
            raise
        except Exception as error:
            if (lost := self.check_folder()) is not None:
                raise lost from error
            # A terminal's Ctrl+C ends the compiler of a step too, before the update.
            was_asked = "C++ compile error" in str(error) and self.control.signals.number
            if was_asked and self.runtime.world_size == 1:
                self.saves.save_step("emergency")
                return self.end_early(signal.Signals(was_asked).name)
            self.heartbeat.enter("saving", self.state.step)
            saved = self.saves.rescue(patience=self.control.margin_seconds)
            if was_asked:  # other ranks may be in the step: nothing can be agreed on
                end_at_once(was_asked)
            if not is_lost_peer(error):
                raise
            raise PeerError(
                f"another rank of this run died after step {self.state.step}; "
                f"{'that step is saved' if saved else 'it was not saved'}, continue with --resume latest"
            ) from error

    def run_steps(self, batches: Iterator[GlobalBatch]) -> str | None:
        """Train on batches in order; return why that ended: None at the end, `rewind`, or the reason of a stop."""
        steps = self.steps
        while True:
            self.heartbeat.enter("reading data", steps.newest_step + 1)
            error: GPT2LabError | None = None
            try:
                batch = next(batches)
            except GPT2LabError as caught:  # all ranks must hear of it before any gradient
                error = caught
            if (reason := self.act_on_requests(error)) is not None:
                return reason
            if not steps.launched:
                steps.log.announce(batch, self.state.step)
            self.heartbeat.enter("training", steps.newest_step + 1)
            with steps.log.while_compiling():
                steps.launch(batch)
                if len(steps.launched) > 1:
                    steps.finish()  # the step before, while the device computes this one; it cannot rewind
                if steps.can_launch_next():
                    continue
                if not steps.finish():
                    self.saves.saved_step = self.state.step
                    return "rewind"
            drift_freq = self.config.system.drift_check_freq
            if drift_freq and self.state.step % drift_freq == 0:
                self.heartbeat.enter("comparing weights", self.state.step)
                check_drift(self.components.model, self.runtime, self.state.step)
            steps.state = dataclasses.replace(self.state, due=self.due_after_step())
            self.measure()
            self.saves.save_if_due()
            if self.is_last:
                return self.end()
            if self.state.step == self.start.stop_after_steps:
                return self.end_early("stop_after_steps")

    def act_on_requests(self, error: GPT2LabError | None) -> str | None:
        """Agree with all ranks what happens next; return why the run ends early, or None.

        Raises: the error that a rank met, on all ranks, once the last complete step is saved.
        """
        self.heartbeat.enter("agreeing", self.steps.newest_step + 1)
        agreed = self.control.agree(error or self.check_folder())
        if isinstance(agreed.error, FolderLostError):
            raise agreed.error
        if self.steps.launched and not agreed.is_quiet:
            self.steps.finish()
        if agreed.error is not None:
            self.saves.save_step("emergency")
            raise agreed.error
        if agreed.stop is not None:
            self.saves.save_step("emergency")
            return self.end_early(agreed.stop)
        if agreed.save:
            self.saves.save_step("rolling")
        return None

    def answer(self, number: int, level: int) -> None:
        """Show at once what a request to stop leads to; called by the signal thread."""
        phase, step = self.heartbeat.doing
        what = {
            "training": f"finishing step {step}, then saving",
            "measuring": f"cutting the evaluation after step {step} short, then saving",
            "saving": f"finishing the checkpoint of step {step}",
        }.get(phase, f"stopping after step {self.steps.newest_step}, then saving")
        self.logger.say(f"{what}{more_to_abort(number, level)}")

    def is_out_of_time(self) -> bool:
        """Tell whether torchrun has asked to stop so long ago that this step should have ended and been saved.

        Over NCCL, a step never ends once a peer has died, and torchrun kills the other ranks some time after it asked.
        """
        signals, grace = self.control.signals, self.saves.grace
        if grace is None or signals.level == 0 or self.state.step == self.steps.steps_before:
            return False  # the first step may compile, and there is nothing to lose yet
        waited = time.monotonic() - signals.asked_at
        return waited > max(grace / 2, self.control.margin_seconds)

    def check_folder(self) -> GPT2LabError | None:
        """Return the error of a run's folder that is gone or taken, on rank 0, which holds its lock."""
        try:
            if self.folder is not None and (warning := self.folder.check_lock()) is not None:
                self.logger.warn(warning, self.state.step)
        except FolderLostError as error:
            return error
        return None

    # -- evaluations after a step --------------------------------------------------------------------------------

    def due_after_step(self) -> tuple[str, ...]:
        """Name what is to be measured after the step just done; before the first step, the validation loss."""
        step, freqs = self.state.step, frequencies(self.config)
        if step == 0:
            return ("eval",)
        due = [name for name, freq in freqs.items() if is_due(step, freq, self.last_step)]
        return tuple(name for name in due if self.evaluator.is_possible(name))

    def measure(self) -> None:
        """Measure what is due; a request to stop leaves the rest in the state, for the resume."""
        self.heartbeat.enter("measuring", self.state.step)
        for name in self.state.due:
            faultpoint(f"measure.{name}", self.state.step)
            if name == "eval":
                self.saves.forget_lost_best()
            state = self.evaluator.measure(name, self.state)
            if state is None:
                return
            left = tuple(other for other in self.state.due if other != name)
            self.steps.state = dataclasses.replace(state, due=left)

    def catch_up(self) -> None:
        """Do what is due before the first step; on a resume, what the last start left undone after the step it saved.

        The start may have been interrupted before the step's measurements, between them, or between the commit of its
        checkpoint and the labels and the event that belong to it.
        """
        due, recorded = self.due_after_step(), self.start.recorded
        if self.state.step == 0:
            self.steps.state = dataclasses.replace(self.state, due=due)
            self.measure()
            return
        if self.state.val_loss is None and (known := recorded.get("eval")):
            self.steps.state = self.state.with_val_loss(known["val_loss"])
        # An evaluation may also be due by this start's --eval_freq, or left out by an earlier version; an error may
        # have ended the start before it noted what is due.
        owed = {*self.state.due, *(["eval"] if self.state.val_loss is None else [])}
        if self.saver.resumed_kind == "emergency" and not self.state.due:
            owed = {*due}
        left = tuple(name for name in due if name in owed - {*recorded})
        self.steps.state = dataclasses.replace(self.state, due=left)
        self.measure()
        # The start before may have been killed before it could stop for this. Only evaluations decide it.
        if "eval" in due and self.evaluator.is_over(self.state) and not self.start.branch:
            self.control.own_reason = "early stopping"
            self.logger.say("--early_stopping_patience 0, or a large enough one, trains on")
        self.saver.complete(self.state, self.saves.labels(), is_recorded="checkpoint" in recorded)

    # -- the end -------------------------------------------------------------------------------------------------

    def end_early(self, reason: str) -> str:
        """Record a stop; the step's checkpoint is on disk, except before the first step: nothing is lost there."""
        checkpoint = self.saves.newest_checkpoint()
        self.logger.event("stop", self.state.step, reason=reason, checkpoint=checkpoint)
        self.logger.say(f"stopped by {reason} after step {self.state.step} of {self.last_step}")
        return reason

    def end(self) -> str | None:
        """Record that the run is complete, or that a stop cut short what is due; return the stop's reason."""
        step, first = self.state.step, self.steps.steps_before
        is_recorded = "done" in self.start.recorded and step == first
        self.heartbeat.enter("measuring", step)
        faultpoint("measure.average", step)
        found = {} if is_recorded or self.state.due else self.evaluator.evaluate_average(self.state)
        if self.state.due or found is None:
            reason = self.control.agree().stop
            assert reason is not None
            return self.end_early(reason)
        self.saver.require_labels(step, self.saves.labels())
        faultpoint("end.before_done", step)
        if not is_recorded:
            self.logger.event(
                "done",
                step,
                reason="completed",
                checkpoint=self.saves.newest_checkpoint(),
                loss=self.steps.last_loss,
                val_loss=self.state.val_loss,
                **found,
                seconds=self.state.train_seconds,
            )
        return None
