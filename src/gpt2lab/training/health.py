"""Bad updates and bad ranks: losses that are not finite, loss spikes, slow ranks, weights that differ between ranks.

The window of recent losses is part of the saved state, so a resumed run decides like one that was never stopped.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import statistics
import time

import torch
from torch import nn

from gpt2lab import WAITING, is_crowded
from gpt2lab.checkpoint import catalog, store
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.checkpoint.store import OVERFLOW, TrainState
from gpt2lab.config.request import LOWER_RATE
from gpt2lab.config.schema import Config
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.sharding import is_sharded
from gpt2lab.errors import CheckpointError, DriftError, NonFiniteError
from gpt2lab.optim.optimizers import can_reject_on_device
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.components import Components
from gpt2lab.training.start import Start
from gpt2lab.training.train_step import StepStats

FEWEST_LOSSES = 64  # with fewer, nothing is a spike: the loss of a young run falls fast
SPIKE_Z = 6.0  # standard deviations
LEAST_SPREAD = 1e-3  # of the mean: the noise of a flat curve is no spike
MOST_NON_FINITE = 4  # in a row: one may be chance, four are not


def z_score(loss: float, recent: tuple[float, ...]) -> float | None:
    """Return how many standard deviations a loss lies above the mean of recent ones; None without enough of them.

    >>> z_score(5.0, (2.0, 4.0) * 64)
    2.0
    """
    if len(recent) < FEWEST_LOSSES:
        return None
    mean = statistics.fmean(recent)
    spread = max(statistics.pstdev(recent, mean), LEAST_SPREAD * abs(mean))
    return (loss - mean) / spread if spread > 0 else None


def is_spike(loss: float, recent: tuple[float, ...]) -> bool:
    """Tell whether a finite loss is a spike; a loss that is not finite is handled separately."""
    z = z_score(loss, recent) if math.isfinite(loss) else None
    return z is not None and z > SPIKE_Z


def has_spiked(stats: StepStats, recent: tuple[float, ...]) -> bool:
    """Tell whether the loss of a step is a spike and its gradient finite; four that are not end the run."""
    return math.isfinite(stats.grad_norm) and is_spike(stats.loss, recent)


def why_host_decides(
    config: Config, optimizers: list[torch.optim.Optimizer], runtime: Runtime
) -> str | None:
    """Return why the loss must be read before the update is made; None if the device can decide.

    The device then rejects an update that is not finite, and the host launches a step before it has read the loss of
    the one before, so that the device never waits for it.
    """
    unable = [type(o).__name__ for o in optimizers if not can_reject_on_device(o)]
    reasons = {
        "the device computes at once": not runtime.runs_ahead,
        f"on_spike {config.optim.on_spike}": config.optim.on_spike != "warn",
        "histograms of gradients": config.log.histogram_freq > 0,
        "reduce exact": config.system.reduce == "exact",
        "fsdp_offload": config.system.fsdp_offload,  # the CPU updates, and waits for gradients
        f"{', '.join(unable)} cannot reject updates on the device": bool(unable),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def report_health(
    state: TrainState, stats: StepStats, batch: GlobalBatch, logger: MetricsLogger, *, spiked: bool
) -> None:
    """Report a skipped update or a spike of the step just done.

    Raises: NonFiniteError when too many updates in a row were not finite.
    """
    step, samples = state.step, f"samples {batch.first_sample} on"
    if spiked:
        done = "its update was made" if stats.updated else "its update was skipped"
        logger.warn(f"step {step}: loss {stats.loss:.4f} is a spike ({samples}); {done}", step)
    elif not stats.updated and state.loss_scale and state.skipped[-1]["reason"] == OVERFLOW:
        now = f"the update was skipped, the loss scale is now {state.loss_scale[0]:g}"
        logger.say(f"step {step}: the gradient exceeds fp16's range; {now}")
    elif not stats.updated:
        count = state.non_finite_in_a_row
        logger.warn(
            f"step {step}: loss {stats.loss}, gradient norm {stats.grad_norm} ({samples}); "
            f"the update was skipped, {count} in a row",
            step,
        )
        if count >= MOST_NON_FINITE:
            raise NonFiniteError(
                f"step {step}: {count} updates in a row were not finite; the weights are as after step "
                f"{step - count}. Resume from a checkpoint {LOWER_RATE}"
            )


# -- rewind ------------------------------------------------------------------------------------------------------------

REWIND_STEPS = 100  # before the spike, where there is a checkpoint that old: later weights may be damaged already
MOST_REWINDS = 10  # of one run: more spikes are not caused by the data


def rewind(
    components: Components,
    state: TrainState,
    batch: GlobalBatch,
    loss: float,
    logger: MetricsLogger,
) -> TrainState | None:
    """Load an earlier checkpoint and continue after the batch that spiked; None if there is no checkpoint.

    The skipped samples are recorded in the state, which alone says where the data continues: a run that is killed and
    resumed, or repeated, skips the same ones. Source: Chowdhery et al. 2022 (PaLM), section 5.1.

    Raises: NonFiniteError after too many; CheckpointError if the checkpoint does not load.
    """
    start, runtime = components.start, components.runtime
    spike, jumped = state.step + 1, batch.first_sample + batch.samples
    if sum(record["reason"] == "rewind" for record in state.skipped) >= MOST_REWINDS:
        raise NonFiniteError(
            f"step {spike}: the loss spiked again after {MOST_REWINDS} rewinds; "
            f"resume from an earlier checkpoint {LOWER_RATE}"
        )
    chosen = runtime.on_rank_zero(lambda: _choose(start, state))
    if chosen is None:
        return None
    loaded, _ = runtime.on_all_ranks(
        lambda: store.load(chosen.path, model=components.model, optimizers=components.optimizers)
    )
    record = {"step": spike, "reason": "rewind", "samples": [loaded.samples, jumped]}
    best_from = min(state.best_from, chosen.step)
    if (loaded.best_step or 0) <= best_from:
        loaded = dataclasses.replace(loaded, best_val_loss=None, best_step=None)
    if runtime.rank == 0:  # before the log says that the run went back
        catalog.supersede(start.run_dir, chosen.step, best=loaded.best_step)
    logger.event("rewind", chosen.step, spike_step=spike, loss=loss, samples=record["samples"])
    logger.warn(
        f"step {spike}: loss {loss:.4f} is a spike; returning to step {chosen.step} and "
        f"skipping the {jumped - loaded.samples:,} windows up to it",
        chosen.step,
    )
    return dataclasses.replace(
        loaded,
        samples=jumped,
        train_seconds=state.train_seconds,
        skipped=(*state.skipped, record),
        history=state.history,
        best_from=best_from,
    )


def _choose(start: Start, state: TrainState) -> CheckpointInfo | None:
    """Return the newest intact checkpoint that is old enough, else the newest intact one.

    Those before a change of data or optimizer number other samples and hold other moments.
    """
    turned = {"data", "optimizer"}
    turns = [turn["step"] for turn in state.history if turned & {*turn.get("changes", ())}]
    oldest = max(turns, default=0) + 1
    listed = catalog.list_checkpoints(start.run_dir)[0]
    infos = [info for info in listed if oldest <= info.step <= state.step]
    old_enough = [info for info in infos if info.step <= state.step + 1 - REWIND_STEPS]
    for info in (*reversed(old_enough), *reversed(infos)):
        try:
            return catalog.open_checkpoint(info.path)
        except CheckpointError:
            continue
    return None


# -- ranks compared with each other ------------------------------------------------------------------------------------

COMPARE_EVERY = 10  # steps
SLOW_RATIO = 1.3  # of the slowest rank to the median
SLOW_IN_A_ROW = 3  # comparisons: once is noise
_LEAST_SECONDS = 0.02  # a step: a smaller difference is not reported
MINUTE_OF_LOOKS = 12  # at the machine's load


class Stragglers:
    """Adds up the work of each rank and names the slowest.

    Full steps take equally long on all ranks, which wait for each other within a step. So the time that each rank
    needs before its first communication in a step is compared.
    """

    def __init__(self, runtime: Runtime, logger: MetricsLogger) -> None:
        self._runtime, self._logger = runtime, logger
        self._work = self._wait = 0.0
        self._suspect, self._times = -1, 0

    def note(self, step: int, *, work_seconds: float, wait_seconds: float) -> None:
        """Note one step: seconds until this rank was ready to meet the others, and those spent on data."""
        if not self._runtime.is_distributed:
            return
        self._work, self._wait = self._work + work_seconds, self._wait + wait_seconds
        if step % COMPARE_EVERY:
            return
        mine = (self._work / COMPARE_EVERY, self._wait / COMPARE_EVERY, socket.gethostname())
        self._work = self._wait = 0.0
        everyone = self._runtime.gather(mine)
        totals = [work + wait for work, wait, _ in everyone]
        slowest = max(range(len(totals)), key=totals.__getitem__)
        median = statistics.median_low(totals)
        is_slow = totals[slowest] > max(SLOW_RATIO * median, median + _LEAST_SECONDS)
        self._times = self._times + 1 if is_slow and slowest == self._suspect else int(is_slow)
        self._suspect = slowest if is_slow else -1
        if self._times == SLOW_IN_A_ROW:
            self._times = 0
            _, wait, host = everyone[slowest]
            self._logger.warn(
                f"rank {slowest} on {host} is slow: {totals[slowest]:.3f} s of its own a step "
                f"({wait:.3f} s waiting for data), the median rank {median:.3f} s; all wait for it",
                step,
            )


class Crowding:
    """Warns once of other programs that keep the processors busy while this run's threads wait by spinning."""

    def __init__(self, runtime: Runtime, logger: MetricsLogger) -> None:
        spins = not any(name in os.environ for name in WAITING) and torch.get_num_threads() > 1
        self._looks = MINUTE_OF_LOOKS if spins and runtime.device.type == "cpu" else 0  # left
        self._logger, self._next = logger, 0.0

    def note(self, step: int) -> None:
        """Check the machine every few seconds; warn if all checks of one minute found it crowded."""
        if not self._looks or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 60 / MINUTE_OF_LOOKS
        # This run's own threads are among those that run.
        self._looks = self._looks - 1 if is_crowded(1) else MINUTE_OF_LOOKS
        if not self._looks:
            self._logger.warn(
                "more threads run than there are processors, and this run's spin while they wait, which can be 4 times "
                "slower; Ctrl+C and --resume latest: a start beside busy programs does not spin",
                step,
            )


def checksum(parameter: torch.Tensor) -> int:
    """Return the sum of a tensor's bits read as 32-bit integers, modulo 2**64: one flipped bit always changes it."""
    bits = parameter.detach().float().contiguous().view(torch.int32)
    return int(bits.sum(dtype=torch.int64))


def check_drift(model: nn.Module, runtime: Runtime, step: int) -> None:
    """Compare the checksum of every parameter that each rank holds a replica of; under fsdp there is none.

    Replicas that once differ stay different, and no loss shows it.

    Raises: DriftError on all ranks, naming the first parameter that differs and its checksums.
    """
    if not runtime.is_distributed:
        return
    copies = {name: p for name, p in model.named_parameters() if not is_sharded(p)}
    everyone = runtime.gather([checksum(parameter) for parameter in copies.values()])
    for name, sums in zip(copies, zip(*everyone, strict=True), strict=True):
        if len(set(sums)) > 1:
            sums_by_rank = ", ".join(f"rank {rank} {value:x}" for rank, value in enumerate(sums))
            raise DriftError(
                f"step {step}: ranks hold different weights, first in {name} (checksums {sums_by_rank}): a memory or "
                f"communication fault; nothing was saved since, resume from the newest checkpoint on other hardware"
            )
