"""What a step tells: its event in metrics.jsonl, and its line on the console."""

from __future__ import annotations

from dataclasses import asdict

import torch

from gpt2lab import fmt
from gpt2lab.checkpoint.state import TrainState
from gpt2lab.config.derived import is_due
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.data.order import Order
from gpt2lab.distributed.compile_cache import compiled_so_far
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.planner.hardware import peak_flops
from gpt2lab.planner.run_clock import RunClock
from gpt2lab.runs.logger import Telemetry
from gpt2lab.training.start import Start
from gpt2lab.training.train_step import StepStats


class StepLog:
    """The log of one start's steps."""

    def __init__(
        self, start: Start, order: Order, runtime: Runtime, clock: RunClock, telemetry: Telemetry
    ) -> None:
        self._start, self._order, self._runtime = start, order, runtime
        self._clock, self._telemetry = clock, telemetry
        self._announced_epoch: int | None = None
        self._tells_compiling = start.config.system.compile == "on"
        device = runtime.device
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak_flops = peak * runtime.world_size if peak else None

    def record(
        self,
        state: TrainState,
        batch: GlobalBatch,
        stats: StepStats,
        *,
        lr: float,
        seconds: float,
        cpu_seconds: float,
    ) -> None:
        """Write the step's event, and its console line if one is due."""
        step, tokens = state.step, self._start.plan.batch.tokens
        rate, flops = tokens / seconds, self._start.plan.flops_per_token
        mfu = rate * flops / self._peak_flops if self._peak_flops else None
        left = self._clock.progress.remaining_interval(step)
        self._telemetry.event(
            "step",
            step,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            step_seconds=seconds,
            tokens_per_second=rate,
            tokens=state.tokens,
            targets=batch.num_targets,
            epoch=batch.epoch,
            data_wait_seconds=batch.wait_seconds,
            mfu=mfu,
            peak_memory_bytes=self._runtime.peak_memory(),
            first_sample=batch.first_sample,
            batch_hash=batch.hash,
            updated=stats.updated,
            cpu_seconds=cpu_seconds,
            **self._clock.fields(left),
        )
        if self._tells_compiling:  # the first step of this start has
            compiled, self._tells_compiling = compiled_so_far(), False
            self._telemetry.event("compile", step, **asdict(compiled))
            self._telemetry.say(compiled.describe())
        last_step, log_freq = self._clock.progress.last_step, self._start.config.log.log_freq
        if step == 1 or is_due(step, log_freq, last_step):
            targets = "" if batch.num_targets == tokens else f" | targets {batch.num_targets:,}"
            shown = "n/a" if mfu is None else f"{mfu:.1%}"
            self._telemetry.say(
                f"step {step}/{last_step} | epoch {batch.epoch} | loss {stats.loss:.4f} | lr {lr:.1e} | "
                f"norm {stats.grad_norm:.2f} | dt {seconds * 1000:.0f} ms | {rate:,.0f} tok/s{targets} | "
                f"mfu {shown} | eta {fmt.duration(left.value if left else None)}"
            )
            if line := self._clock.line(step, left):
                self._telemetry.say(line)

    def announce_epoch(self, batch: GlobalBatch) -> None:
        """Say which epoch begins, or is entered by a resume, and the order of its shards.

        Where steps are shown less often than epochs begin, the first is enough.
        """
        order = self._order
        between = self._start.config.log.log_freq * batch.samples
        is_first = self._announced_epoch is None
        if batch.epoch == self._announced_epoch:
            return
        self._announced_epoch = batch.epoch
        if order.windows_per_epoch < between and not is_first:
            return
        shards = [
            self._start.data.splits["train"][i].path.stem for i in order.shard_order(batch.epoch)
        ]
        more = f" and {len(shards) - 6} more" if len(shards) > 6 else ""
        self._telemetry.say(
            f"epoch {batch.epoch} of {self._start.plan.epochs:.2f} | {order.windows_per_epoch:,} windows | "
            f"shuffle {self._start.config.data.shuffle} | shards: {', '.join(shards[:6])}{more}"
        )
