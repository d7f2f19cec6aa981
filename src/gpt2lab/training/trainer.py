"""The loop: step, then whatever is due after it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.state import NOT_FINITE, TrainState
from gpt2lab.config.derived import is_due
from gpt2lab.data.loader import GlobalBatch, Loader
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import GPT2LabError, PeerError, TornUpdateError, is_lost_peer
from gpt2lab.model import rng
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.schedule import lr_at
from gpt2lab.planner.run_clock import RunClock
from gpt2lab.runs.logger import Telemetry
from gpt2lab.training.control import Control
from gpt2lab.training.drift import check_drift
from gpt2lab.training.evaluator import Measurements
from gpt2lab.training.health import accepts, report_health
from gpt2lab.training.heartbeat import Heartbeat
from gpt2lab.training.histograms import Histograms
from gpt2lab.training.rewind import rewind
from gpt2lab.training.saver import Saver
from gpt2lab.training.spikes import is_spike
from gpt2lab.training.start import Start
from gpt2lab.training.step_log import StepLog
from gpt2lab.training.stop import launcher_grace_seconds
from gpt2lab.training.stragglers import Stragglers
from gpt2lab.training.train_step import train_step

_SAVE_BYTES_PER_SECOND = 1e8  # assumed before the first save was measured


@dataclass
class Trainer:
    """The parts of a run, put together by the recipe, and the loop over them."""

    start: Start
    model: GPT  # plain: evaluated, sampled and saved
    wrapped: nn.Module  # the same weights, distributed: trained
    optimizers: list[torch.optim.Optimizer]
    loader: Loader
    measurements: Measurements
    histograms: Histograms
    strategy: Strategy
    runtime: Runtime
    telemetry: Telemetry
    saver: Saver
    control: Control
    heartbeat: Heartbeat
    state: TrainState
    clock: RunClock

    def __post_init__(self) -> None:
        config = self.start.config
        self.config = config
        self.last_step = self.start.plan.max_steps
        self.saved_step = (
            self.state.step
        )  # a resumed one is on disk; before the first there is nothing to lose
        self.last_loss: float | None = None
        self.progress = self.clock.progress
        if self.start.last_save_seconds is not None:
            self.progress.record_event("checkpoint", self.start.last_save_seconds)
        self.grace = launcher_grace_seconds(os.environ)
        self.log = StepLog(self.start, self.loader.order, self.runtime, self.clock, self.telemetry)
        self.stragglers = Stragglers(self.runtime, self.telemetry)

    def fit(self) -> str | None:
        """Train to the last step, or to a stop, and return what stopped it, None for the end.

        Raises: NonFiniteError, SaveError, DataError, DriftError; PeerError if another process died.
        """
        self.warn_of_grace()
        try:
            self.measure_before_first_step()
            while True:
                with contextlib.closing(self.loader.batches(self.state.samples)) as batches:
                    reason = self.train_on(batches)
                if reason != "rewind":
                    return None if reason == "end" else reason
        except (GPT2LabError, TornUpdateError):
            raise
        except Exception as error:  # the weights are those of the last complete step
            saved = self.saved_step == self.state.step or self.saver.rescue(self.state)
            if not is_lost_peer(error):
                raise
            raise PeerError(
                f"another process of this run died after step {self.state.step}; "
                f"{'that step is saved' if saved else 'it was not saved'}, go on with --resume latest"
            ) from error

    def train_on(self, batches: Iterator[GlobalBatch]) -> str:
        """Train on batches in order until something ends that: the `end`, a `rewind`, or the name of a stop."""
        while True:
            self.heartbeat.enter("reading data", self.state.step + 1)
            batch, refusal = fetch(batches)
            self.heartbeat.enter("agreeing", self.state.step + 1)
            request = self.control.agree(refusal)  # the one moment at which a run may end early
            if request.refusal is not None:
                self.save_step("emergency")
                raise request.refusal
            if request.stop is not None:
                self.save_step("emergency")
                return self.end_early(request.stop)
            if request.save:
                self.save_step("rolling")
            assert batch is not None
            self.log.announce_epoch(batch)
            self.heartbeat.enter("training", self.state.step + 1)
            if not self.step(batch):
                return "rewind"
            self.check_drift_if_due()
            self.heartbeat.enter("measuring", self.state.step)
            self.measure()
            self.save_if_due()
            if self.is_last:
                self.end()
                return "end"
            if self.state.step == self.start.stop_after_steps:
                return self.end_early("stop_after_steps")

    @property
    def is_last(self) -> bool:
        """Tell whether the step just done was the run's last."""
        return self.state.step == self.last_step

    @property
    def place(self) -> str:
        """Name the step just done, as every console line begins."""
        return f"step {self.state.step}/{self.last_step}"

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, batch: GlobalBatch) -> bool:
        """Take the next optimizer step and record it; False if the run went back instead."""
        began, cpu_began = time.monotonic(), time.process_time()
        number = self.state.step + 1
        policy = self.config.optim.on_spike
        faultpoint("step", number)
        lr = lr_at(number, self.config.optim, max_steps=self.last_step)
        aside = 0.0  # seconds spent on looking at gradients, which are there before the update only

        def accept(loss: float, norm: float) -> bool:
            nonlocal aside
            aside = self.histograms.gradients(number)
            return accepts(loss, norm, self.state, policy)

        stats = train_step(
            self.wrapped,
            self.optimizers,
            batch,
            lr,
            strategy=self.strategy,
            grad_clip=self.config.optim.grad_clip,
            seed=rng.fold_seed(self.config.data.seed, number),
            accept=accept,
        )
        self.runtime.synchronize()
        self.stragglers.note(
            number, work_seconds=self.strategy.work_seconds(), wait_seconds=batch.wait_seconds
        )
        seconds = time.monotonic() - began - aside + batch.wait_seconds
        spiked = is_spike(stats.loss, self.state.recent_losses)
        if spiked and policy == "rewind" and self.rewind(batch, stats.loss):
            return False
        self.state = self.state.advance(
            samples=batch.samples,
            tokens=self.start.plan.batch.tokens,
            seconds=seconds,
            loss=stats.loss,
            refused=None if stats.updated else "spike" if spiked else NOT_FINITE,
        )
        self.last_loss = stats.loss
        self.progress.record_step(seconds)
        self.control.margin_seconds = self.progress.stop_seconds(
            assumed_save=self.start.plan.checkpoint_bytes / _SAVE_BYTES_PER_SECOND
        )
        cpu_seconds = time.process_time() - cpu_began
        self.log.record(self.state, batch, stats, lr=lr, seconds=seconds, cpu_seconds=cpu_seconds)
        report_health(self.state, stats, batch, self.telemetry, spiked=spiked)
        return True

    def rewind(self, batch: GlobalBatch, loss: float) -> bool:
        """Go back before the spike if there is a checkpoint to go to."""
        state = rewind(
            self.start,
            self.state,
            batch,
            loss,
            model=self.model,
            optimizers=self.optimizers,
            runtime=self.runtime,
            telemetry=self.telemetry,
        )
        if state is not None:
            self.state, self.saved_step = state, state.step
        return state is not None

    def check_drift_if_due(self) -> None:
        """Compare the processes' weights every so many steps."""
        freq = self.config.system.drift_check_freq
        if freq and self.state.step % freq == 0:
            self.heartbeat.enter("comparing weights", self.state.step)
            check_drift(self.model, self.runtime, self.state.step)

    # -- what is due after a step --------------------------------------------------------------------------------

    def is_due(self, freq: int) -> bool:
        """Tell whether something with this frequency happens after the step just done."""
        return is_due(self.state.step, freq, self.last_step)

    def measure_before_first_step(self) -> None:
        """Evaluate a fresh run at step 0, and a resumed one whose stop came before its evaluation."""
        if self.state.step == 0:
            self.state = self.measurements.evaluate(self.state)
        elif self.is_due(self.config.eval.eval_freq) and self.state.val_loss is None:
            self.state = self.measurements.evaluate(self.state)
            if self.state.best_step == self.state.step:
                self.saver.label(self.state.step, ["best"])  # the step itself is on disk

    def measure(self) -> None:
        """Evaluate, sample and look at the weights, each if due."""
        if self.is_due(self.config.eval.eval_freq):
            self.state = self.measurements.evaluate(self.state)
        if self.is_due(self.config.eval.hellaswag_freq):
            self.measurements.evaluate_hellaswag(self.state)
        if self.is_due(self.config.eval.sample_freq):
            self.measurements.sample(self.state)
        self.histograms.parameters(self.state.step)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_if_due(self) -> None:
        """Save this step once, whatever the number of reasons, and set its labels."""
        step, epochs = self.state.step, self.epochs_completed()
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
        labels = [f"epoch_{epochs:04d}"] if epochs is not None else []
        labels += ["best"] if is_best else []
        self.save(kinds[0], labels, must_succeed=self.is_last or is_planned_stop)

    def save_step(self, kind: Literal["rolling", "emergency"]) -> None:
        """Save the step just done, unless that has happened."""
        if self.saved_step == self.state.step:
            self.control.note_save()
            return
        is_end = kind == "emergency"
        labels = [f"emergency_{self.state.step:08d}"] if is_end else []
        self.save(kind, labels, must_succeed=is_end)

    def epochs_completed(self) -> int | None:
        """Return how many epochs are done if the step just taken ended one that is to be kept, else None."""
        if self.config.checkpoint.epoch_checkpoints == "off":
            return None
        order = self.loader.order
        before = order.epoch_of(self.state.samples - self.start.plan.batch.samples)
        now = order.epoch_of(self.state.samples)
        return now if now > before else None

    def save(self, kind: str, labels: list[str], *, must_succeed: bool) -> None:
        """Have this step saved, and note what it cost.

        Raises: SaveError if it failed and must not.
        """
        # No checkpoint rests on data that turns out to be damaged; one process's refusal is everyone's.
        self.runtime.everywhere(self.loader.wait_until_verified)
        self.heartbeat.enter("comparing weights", self.state.step)
        check_drift(self.model, self.runtime, self.state.step)  # the first process speaks for all
        self.heartbeat.enter("saving", self.state.step)
        saved, seconds = self.saver.save(self.state, kind, labels, must_succeed=must_succeed)
        self.control.note_save()  # a failed one too: it is not tried again at every step
        if saved:
            self.saved_step = self.state.step
            self.progress.record_event("checkpoint", seconds)
            self.warn_of_grace()

    def warn_of_grace(self) -> None:
        """Say once if a stop would take longer than the launcher waits before it kills."""
        needed = self.progress.stop_seconds()
        if self.grace is None or needed <= self.grace:
            return
        self.telemetry.warn(
            f"a clean stop takes about {needed:.0f} s, torchrun kills after {self.grace:.0f} s: the newest checkpoint "
            f"would then be all that is left; start it with --shutdown-timeout {2 * math.ceil(needed)}",
            self.state.step,
        )
        self.grace = None

    # -- the end -------------------------------------------------------------------------------------------------

    def end_early(self, reason: str) -> str:
        """Record a stop; the step's checkpoint is on disk, except before the first step: nothing is lost there."""
        self.telemetry.event(
            "stop", self.state.step, reason=reason, checkpoint=self.newest_checkpoint()
        )
        self.telemetry.say(f"stopped by {reason} after step {self.state.step} of {self.last_step}")
        return reason

    def end(self) -> None:
        """Record that the run is complete."""
        self.telemetry.event(
            "done",
            self.state.step,
            reason="completed",
            checkpoint=self.newest_checkpoint(),
            loss=self.last_loss,
            val_loss=self.state.val_loss,
            seconds=self.state.train_seconds,
        )

    def newest_checkpoint(self) -> str | None:
        """Return the path of the run's newest checkpoint."""
        infos, _ = catalog.list_checkpoints(self.start.run_dir)
        return str(infos[-1].path) if infos else None


def fetch(batches: Iterator[GlobalBatch]) -> tuple[GlobalBatch | None, GPT2LabError | None]:
    """Return the next batch, or the refusal that this process met: all must hear of it before any gradient."""
    try:
        return next(batches), None
    except GPT2LabError as refusal:
        return None, refusal
