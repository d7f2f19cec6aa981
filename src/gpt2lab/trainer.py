"""The loop: step, then whatever is due after it."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from gpt2lab import catalog, fmt, rng
from gpt2lab.data.loader import GlobalBatch, Loader
from gpt2lab.data.tokenizer import NUM_TOKENS
from gpt2lab.errors import DataError, NonFiniteError
from gpt2lab.faults import faultpoint
from gpt2lab.hardware import peak_flops
from gpt2lab.hellaswag import HellaSwag, summarize
from gpt2lab.model import GPT
from gpt2lab.parallel import Strategy
from gpt2lab.planning.run_clock import OUT_OF_TIME, RunClock
from gpt2lab.progress import is_due
from gpt2lab.results import Results, keep_results
from gpt2lab.runtime import Runtime
from gpt2lab.sample import sample_text
from gpt2lab.saver import Saver
from gpt2lab.schedule import lr_at
from gpt2lab.start import Start
from gpt2lab.state import TrainState
from gpt2lab.stop import StopFlag
from gpt2lab.telemetry import Telemetry
from gpt2lab.train_step import StepStats, train_step
from gpt2lab.validation import Validation


@dataclass
class Trainer:
    """The parts of a run, put together by the recipe, and the loop over them."""

    start: Start
    model: GPT  # plain: evaluated, sampled and saved
    wrapped: nn.Module  # the same weights, distributed: trained
    optimizers: list[torch.optim.Optimizer]
    loader: Loader
    validation: Validation
    hellaswag: HellaSwag | None  # without items the evaluation is off
    strategy: Strategy
    runtime: Runtime
    telemetry: Telemetry
    saver: Saver
    stop: StopFlag
    state: TrainState
    clock: RunClock

    def __post_init__(self) -> None:
        config = self.start.config
        self.config = config
        self.last_step = self.start.plan.max_steps
        self.announced_epoch: int | None = None
        self.last_loss: float | None = None
        self.progress = self.clock.progress
        device = self.runtime.device
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak_flops = peak * self.runtime.world_size if peak else None

    def fit(self) -> str | None:
        """Train to the last step, or to a stop, and return what stopped it, None for the end.

        Raises: NonFiniteError, SaveError, DataError.
        """
        self.measure_before_first_step()
        signal = self.signalled()
        if signal is not None:
            return self.end_early(signal)
        with contextlib.closing(self.loader.batches(self.state.samples)) as batches:
            for batch in batches:
                self.announce_epoch(batch)
                self.step(batch)
                if self.runtime.rank == 0 and self.clock.is_out_of_time(self.state.step):
                    self.stop.request(OUT_OF_TIME)  # the first process's clock decides for all
                signal = self.signalled()
                if signal is None or self.is_last:
                    self.measure()
                    signal = self.signalled()  # one may have come meanwhile, and cut it short
                self.save_if_due(signal)
                if self.is_last:
                    self.end()
                    return None
                if signal is not None:
                    return self.end_early(signal)
                if self.state.step == self.start.stop_after_steps:
                    return self.end_early("stop_after_steps")
        raise AssertionError("the loader never ends")

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
        began, cpu_began = time.monotonic(), time.process_time()
        number = self.state.step + 1
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
        cpu_seconds = time.process_time() - cpu_began
        self.record(batch, stats, lr=lr, seconds=seconds, cpu_seconds=cpu_seconds)

    def record(
        self,
        batch: GlobalBatch,
        stats: StepStats,
        *,
        lr: float,
        seconds: float,
        cpu_seconds: float,
    ) -> None:
        """Write the step's event, and its console line if one is due."""
        step, rate = self.state.step, batch.num_targets / seconds
        mfu = rate * self.start.plan.flops_per_token / self.peak_flops if self.peak_flops else None
        left = self.progress.remaining_interval(step)
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
            cpu_seconds=cpu_seconds,
            **self.clock.fields(left),
        )
        if step == 1 or is_due(step, self.config.log.log_freq, self.last_step):
            self.telemetry.say(
                f"{self.place} | epoch {batch.epoch} | loss {stats.loss:.4f} | lr {lr:.1e} | "
                f"norm {stats.grad_norm:.2f} | dt {seconds * 1000:.0f} ms | {rate:,.0f} tok/s | "
                f"mfu {'n/a' if mfu is None else f'{mfu:.1%}'} | eta {fmt.duration(left.value if left else None)}"
            )
            if line := self.clock.line(step, left):
                self.telemetry.say(line)

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
            self.evaluate()
        elif self.is_due(self.config.eval.eval_freq) and self.state.val_loss is None:
            self.evaluate()
            if self.state.best_step == self.state.step:
                self.saver.label(self.state.step, ["best"])  # the step itself is on disk

    def measure(self) -> None:
        """Evaluate and sample, each if due."""
        if self.is_due(self.config.eval.eval_freq):
            self.evaluate()
        if self.hellaswag is not None and self.is_due(self.config.eval.hellaswag_freq):
            self.evaluate_hellaswag(self.hellaswag)
        if self.is_due(self.config.eval.sample_freq):
            self.sample()

    def evaluate(self) -> None:
        """Measure the validation loss of the weights as they are after this step."""
        began = time.monotonic()
        result = self.validation.measure(self.model, interrupted=self.is_interrupted)
        if result is None:
            return
        seconds = time.monotonic() - began
        if not math.isfinite(result.val_loss):
            raise NonFiniteError(
                f"step {self.state.step}: validation loss {result.val_loss}; nothing of this step was saved. "
                f"Resume from a checkpoint with a lower --max_lr and --allow_change max_lr"
            )
        self.state = self.state.with_val_loss(result.val_loss)
        self.progress.record_event("eval", seconds)
        self.telemetry.event(
            "eval",
            self.state.step,
            val_loss=result.val_loss,
            val_loss_se=result.val_loss_se,
            val_tokens=result.val_tokens,
            bits_per_byte=result.bits_per_byte,
            seconds=seconds,
        )
        self.keep(result.results)
        error = "n/a" if result.val_loss_se is None else f"{result.val_loss_se:.4f}"
        bits = "" if result.bits_per_byte is None else f" ({result.bits_per_byte:.4f} bits/byte)"
        best = " | best so far" if self.state.best_step == self.state.step else ""
        self.telemetry.say(
            f"{self.place} | val loss {result.val_loss:.4f} +- {error}{bits} "
            f"on {result.val_tokens:,} tokens | {fmt.duration(seconds)}{best}"
        )

    def evaluate_hellaswag(self, hellaswag: HellaSwag) -> None:
        """Measure HellaSwag accuracy of the weights as they are after this step."""
        began = time.monotonic()
        results = hellaswag.measure(self.model, interrupted=self.is_interrupted)
        if results is None:
            return
        seconds = time.monotonic() - began
        self.progress.record_event("hellaswag", seconds)
        summary = summarize(results)
        self.telemetry.event("hellaswag", self.state.step, **summary, seconds=seconds)
        self.keep(results)
        error = "n/a" if summary["acc_norm_se"] is None else f"{summary['acc_norm_se']:.4f}"
        self.telemetry.say(
            f"{self.place} | HellaSwag acc_norm {summary['acc_norm']:.4f} +- {error}, "
            f"acc {summary['acc']:.4f}, acc_token_norm {summary['acc_token_norm']:.4f} "
            f"on {results.n:,} items | {fmt.duration(seconds)}"
        )

    def keep(self, results: Results) -> None:
        """Have an evaluation kept unit by unit, for scripts/compare.py."""
        step = self.state.step
        problem = (
            keep_results(self.start.run_dir, results, step) if self.runtime.rank == 0 else None
        )
        if problem:
            self.telemetry.warn(problem, step)

    def sample(self) -> None:
        """Continue the run's prompt on the first process; the others go on to wait at the next step."""
        if self.runtime.rank != 0 or self.config.model.vocab_size < NUM_TOKENS:
            return
        began = time.monotonic()
        try:
            with self.strategy.autocast():
                text = sample_text(
                    self.model,
                    self.config.eval.sample_prompt,
                    max_new_tokens=self.config.eval.sample_tokens,
                    seed=rng.fold_seed(self.config.data.seed, self.state.step),
                )
        except DataError as error:  # no vocabulary: training does not need it
            self.telemetry.warn(f"no text sample: {error}", self.state.step)
            return
        seconds = time.monotonic() - began
        self.progress.record_event("sample", seconds)
        self.telemetry.event("sample", self.state.step, text=text, seconds=seconds)
        self.telemetry.say(f"{self.place} | sample: {text!r}")

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_if_due(self, signal: str | None) -> None:
        """Save this step once, whatever the number of reasons, and set its labels."""
        step, epochs = self.state.step, self.epochs_completed()
        is_best = self.state.best_step == step
        is_planned_stop = step == self.start.stop_after_steps or signal == OUT_OF_TIME
        reasons = {
            "final": self.is_last,
            "rolling": self.is_due(self.config.checkpoint.checkpoint_freq) or is_planned_stop,
            "epoch": epochs is not None,
            "best": is_best,
            "emergency": signal is not None and not is_planned_stop,
        }
        kinds = [kind for kind, applies in reasons.items() if applies]
        if not kinds:
            return
        labels = [f"epoch_{epochs:04d}"] if epochs is not None else []
        labels += ["best"] if is_best else []
        labels += [f"emergency_{step:08d}"] if kinds[0] == "emergency" else []
        self.save(
            kinds[0], labels, must_succeed=self.is_last or is_planned_stop or signal is not None
        )

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
        self.loader.wait_until_verified()  # no checkpoint rests on data that turns out to be damaged
        seconds = self.saver.save(self.state, kind, labels, must_succeed=must_succeed)
        self.progress.record_event("checkpoint", seconds)

    # -- the end -------------------------------------------------------------------------------------------------

    def is_interrupted(self) -> bool:
        """Tell all processes whether some was asked to stop; evaluations ask at equal places."""
        return self.runtime.any(self.stop.signal_name is not None)

    def signalled(self) -> str | None:
        """Return the name of a signal that asked some process to stop, or None; agreed by all."""
        if not self.is_interrupted():
            return None
        return next(name for name in self.runtime.gather(self.stop.signal_name) if name)

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
