"""When a run saves, under which labels, and what must hold before; the Saver does the writing."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Literal

from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.derived import is_due
from gpt2lab.errors import DataError
from gpt2lab.paths import LAUNCHED
from gpt2lab.training.components import Components, Session
from gpt2lab.training.health import check_drift
from gpt2lab.training.saver import Saver
from gpt2lab.training.steps import StepPipeline
from gpt2lab.training.stop import GRACE, launcher_grace_seconds


class SavePolicy:
    """Decides which steps of a run are saved."""

    def __init__(
        self, components: Components, session: Session, saver: Saver, steps: StepPipeline
    ) -> None:
        self.start, self.runtime = components.start, components.runtime
        self.model, self.loader = components.model, components.batches.loader
        self.config, self.saver, self.steps = components.start.config, saver, steps
        self.logger, self.control = session.logger, session.control
        self.heartbeat, self.progress = session.heartbeat, session.clock.progress
        # A resumed step is on disk; before the first there is nothing to lose.
        self.saved_step = steps.state.step
        if not saver.is_async and self.start.last_save_seconds is not None:
            self.progress.record_event("checkpoint", self.start.last_save_seconds)
        self.grace, self._warned_of_grace = launcher_grace_seconds(os.environ), False

    @property
    def state(self) -> TrainState:
        """The state after the newest complete step."""
        return self.steps.state

    def save_if_due(self) -> None:
        """Save this step once, whatever the number of reasons, and set its labels."""
        step, last = self.state.step, self.steps.last_step
        is_planned_stop = step == self.start.stop_after_steps
        freq = self.config.checkpoint.checkpoint_freq
        reasons = {
            "final": step == last,
            "rolling": is_due(step, freq, last) or is_planned_stop,
            "epoch": self.start.epochs_completed(self.state.samples) is not None,
            "best": self.state.best_step == step,
        }
        kinds = [kind for kind, applies in reasons.items() if applies]
        if kinds:
            self.save(kinds[0], self.labels(), must_succeed=step == last or is_planned_stop)

    def labels(self) -> list[str]:
        """Return the labels of a checkpoint of the step just done."""
        epochs = self.start.epochs_completed(self.state.samples)
        labels = [f"epoch_{epochs:04d}"] if epochs is not None else []
        return labels + (["best"] if self.state.best_step == self.state.step else [])

    def forget_lost_best(self) -> None:
        """Compare later losses with the best checkpoint that is on disk, if a better one is not, or no more."""
        if self.state.best_step in (None, self.state.step):
            return
        found = self.runtime.on_rank_zero(lambda: self.saver.best_left(self.state))
        if found is not None:
            step, loss = found
            self.steps.state = dataclasses.replace(self.state, best_step=step, best_val_loss=loss)

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

    def save(self, kind: str, labels: list[str], *, must_succeed: bool) -> None:
        """Save this step, and record how long it took.

        Raises: SaveError if it failed and must not.
        """
        self.forget_lost_best()
        self._check_data(may_wait=kind != "emergency")
        self.heartbeat.enter("comparing weights", self.state.step)
        check_drift(self.model, self.runtime, self.state.step)  # rank 0 saves for all
        self.heartbeat.enter("saving", self.state.step)
        self.logger.show(f"step {self.state.step}/{self.steps.last_step} | saving")
        with self.steps.busy:  # a second thread must not write the same files
            stalled = self.saver.save(self.state, kind, labels, must_succeed=must_succeed)
        self.control.note_save()  # a failed one too: it is not tried again at every step
        if stalled is not None:
            self.saved_step = self.state.step
            self.progress.record_event("checkpoint", stalled)
            if self.saver.stop_seconds is not None:  # a save before a stop waits for the thread
                self.heartbeat.expect("saving", self.saver.stop_seconds)
            self.warn_of_grace()

    def rescue(self, patience: float = 0.0) -> bool:
        """Save the last complete step without communication; return whether it is on disk.

        The heartbeat's thread calls this too, when this one hangs. It does nothing once an update has begun whose
        state is not known, or while a checkpoint is written. Training does not continue afterwards. `patience`: seconds
        to wait for a step on the device to complete.
        """
        if not self.steps.busy.acquire(blocking=False):
            return False
        try:
            self.steps.record_complete(patience)
            if self.saved_step == self.state.step and self.saver.has(self.state.step):
                return True
            unverified = self.loader.reader.verifier.unverified()
        except (DataError, RuntimeError):  # RuntimeError: of the device
            return False
        state = dataclasses.replace(self.state, unverified=unverified)
        return self.saver.rescue(state, self.steps.has_begun_update)

    def _check_data(self, *, may_wait: bool) -> None:
        """Verify the data that was read, so that no checkpoint depends on damaged data.

        A save at the end of a start must not wait for the hashes of hundreds of GB: it names the shards that are left,
        which the resume verifies before its first save.
        """
        verifier = self.loader.reader.verifier
        names: tuple[str, ...] = ()
        if may_wait:
            self.runtime.on_all_ranks(verifier.wait)
        else:
            of_ranks = self.runtime.gather(self.runtime.on_all_ranks(verifier.unverified))
            names = tuple(sorted(set().union(*of_ranks)))
        self.steps.state = dataclasses.replace(self.state, unverified=names)
        if names:
            self.logger.warn(
                f"{len(names)} shards read so far are not verified yet ({names[0]}, ...); the resume does that first",
                self.state.step,
            )

    def warn_of_grace(self) -> None:
        """Say once if a stop would take longer than the launcher waits before it kills."""
        needed = self.steps.stop_seconds()
        if self.grace is None or self._warned_of_grace or needed <= self.grace:
            return
        flag = f"{GRACE}=" if LAUNCHED in os.environ else "--shutdown-timeout "
        self.logger.warn(
            f"a clean stop takes about {needed:.0f} s, torchrun kills after {self.grace:.0f} s: the newest checkpoint "
            f"would then be all that is left; start it with {flag}{2 * math.ceil(needed)}",
            self.state.step,
        )
        self._warned_of_grace = True

    def newest_checkpoint(self) -> str | None:
        """Return the path of the run's newest checkpoint."""
        infos, _ = catalog.list_checkpoints(self.start.run_dir)
        return str(infos[-1].path) if infos else None
