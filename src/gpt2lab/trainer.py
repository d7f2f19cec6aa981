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

from gpt2lab import catalog, fmt, rng
from gpt2lab.control import Control
from gpt2lab.data.loader import GlobalBatch, Loader
from gpt2lab.errors import GPT2LabError, NonFiniteError
from gpt2lab.faults import faultpoint
from gpt2lab.hardware import peak_flops
from gpt2lab.measurements import Measurements
from gpt2lab.model import GPT
from gpt2lab.parallel import Strategy
from gpt2lab.progress import is_due
from gpt2lab.runtime import Runtime
from gpt2lab.saver import Saver
from gpt2lab.schedule import lr_at
from gpt2lab.start import Start
from gpt2lab.state import TrainState
from gpt2lab.stop import launcher_grace_seconds
from gpt2lab.telemetry import Telemetry
from gpt2lab.train_step import StepStats, train_step


@dataclass
class Trainer:
    """The parts of a run, put together by the recipe, and the loop over them."""

    start: Start
    model: GPT  # plain: evaluated, sampled and saved
    wrapped: nn.Module  # the same weights, distributed: trained
    optimizers: list[torch.optim.Optimizer]
    loader: Loader
    measurements: Measurements
    strategy: Strategy
    runtime: Runtime
    telemetry: Telemetry
    saver: Saver
    control: Control
    state: TrainState

    def __post_init__(self) -> None:
        config = self.start.config
        self.config = config
        self.last_step = self.start.plan.max_steps
        self.began = time.monotonic()
        self.announced_epoch: int | None = None
        self.saved_step = (
            self.state.step
        )  # a resumed one is on disk; before the first there is nothing to lose
        self.last_loss: float | None = None
        self.progress = self.measurements.progress
        if self.start.last_save_seconds is not None:
            self.progress.record_event("checkpoint", self.start.last_save_seconds)
        self.grace = launcher_grace_seconds(os.environ)
        device = self.runtime.device
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak_flops = peak * self.runtime.world_size if peak else None

    def fit(self) -> str | None:
        """Train to the last step, or to a stop, and return what stopped it, None for the end.

        Raises: NonFiniteError, SaveError, DataError.
        """
        self.warn_of_grace()
        self.measure_before_first_step()
        with contextlib.closing(self.loader.batches(self.state.samples)) as batches:
            while True:
                batch, refusal = fetch(batches)
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
                self.announce_epoch(batch)
                self.step(batch)
                self.measure()
                self.save_if_due()
                if self.is_last:
                    self.end()
                    return None
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

    def step(self, batch: GlobalBatch) -> None:
        """Take the next optimizer step and record it."""
        began, number = time.monotonic(), self.state.step + 1
        faultpoint("step", number)
        lr = lr_at(number, self.config.optim, max_steps=self.last_step)
        try:
            stats = train_step(
                self.wrapped,
                self.optimizers,
                batch,
                lr,
                strategy=self.strategy,
                grad_clip=self.config.optim.grad_clip,
                seed=rng.fold_seed(self.config.data.seed, number),
            )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {number}: {error}; the weights were left as after step {self.state.step}. "
                f"Resume from a checkpoint with a lower --max_lr and --allow_change max_lr"
            ) from None
        self.runtime.synchronize()
        seconds = time.monotonic() - began + batch.wait_seconds
        self.state = self.state.advance(
            samples=batch.samples, tokens=batch.num_targets, seconds=seconds
        )
        self.last_loss = stats.loss
        self.progress.record_step(seconds)
        self.control.margin_seconds = self.progress.stop_seconds()
        self.record(batch, stats, lr=lr, seconds=seconds)

    def record(self, batch: GlobalBatch, stats: StepStats, *, lr: float, seconds: float) -> None:
        """Write the step's event, and its console line if one is due."""
        step, rate = self.state.step, batch.num_targets / seconds
        mfu = rate * self.start.plan.flops_per_token / self.peak_flops if self.peak_flops else None
        remaining = self.progress.remaining(step)
        self.telemetry.event(
            "step",
            step,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            step_seconds=seconds,
            tokens_per_second=rate,
            tokens=self.state.tokens,
            epoch=batch.epoch,
            data_wait_seconds=batch.wait_seconds,
            mfu=mfu,
            peak_memory_bytes=self.runtime.peak_memory(),
            first_sample=batch.first_sample,
            batch_hash=batch.hash,
            elapsed_seconds=time.monotonic() - self.began,
            remaining_seconds=remaining,
        )
        if step == 1 or is_due(step, self.config.log.log_freq, self.last_step):
            self.telemetry.say(
                f"{self.place} | epoch {batch.epoch} | loss {stats.loss:.4f} | lr {lr:.1e} | "
                f"norm {stats.grad_norm:.2f} | dt {seconds * 1000:.0f} ms | {rate:,.0f} tok/s | "
                f"mfu {'n/a' if mfu is None else f'{mfu:.1%}'} | eta {fmt.duration(remaining)}"
            )

    def announce_epoch(self, batch: GlobalBatch) -> None:
        """Say which epoch begins, or is entered by a resume, and the order of its shards."""
        if batch.epoch == self.announced_epoch:
            return
        self.announced_epoch = batch.epoch
        order = self.loader.order
        shards = [
            self.start.data.splits["train"][i].path.stem for i in order.shard_order(batch.epoch)
        ]
        more = f" and {len(shards) - 6} more" if len(shards) > 6 else ""
        self.telemetry.say(
            f"epoch {batch.epoch} of {self.start.plan.epochs:.2f} | {order.windows_per_epoch:,} windows | "
            f"shuffle {self.config.data.shuffle} | shards: {', '.join(shards[:6])}{more}"
        )

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
        """Evaluate and sample, each if due."""
        if self.is_due(self.config.eval.eval_freq):
            self.state = self.measurements.evaluate(self.state)
        if self.is_due(self.config.eval.hellaswag_freq):
            self.measurements.evaluate_hellaswag(self.state)
        if self.is_due(self.config.eval.sample_freq):
            self.measurements.sample(self.state)

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
        """Return how many epochs are done if the step just taken ended one, else None."""
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
