"""Bad updates: losses that are not finite, loss spikes, and what is done about them.

The window of recent losses is part of the saved state, so a resumed run judges as the one that was never stopped.
"""

from __future__ import annotations

import math
import statistics

import torch

from gpt2lab.checkpoint.state import TrainState
from gpt2lab.config.schema import Config
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import NonFiniteError
from gpt2lab.optim.optimizers import can_reject_on_device
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.train_step import StepStats, is_finite

FEWEST = 64  # before there are as many, nothing is a spike: a young run falls fast
LIMIT = 6.0  # standard deviations
LEAST_SPREAD = 1e-3  # of the mean: a flat curve is not a licence to call noise a spike


def z_score(loss: float, recent: tuple[float, ...]) -> float | None:
    """Return how many standard deviations a loss lies above the mean of recent ones; None without enough of them.

    >>> z_score(5.0, (2.0, 4.0) * 64)
    2.0
    """
    if len(recent) < FEWEST:
        return None
    mean = statistics.fmean(recent)
    spread = max(statistics.pstdev(recent, mean), LEAST_SPREAD * abs(mean))
    return (loss - mean) / spread if spread > 0 else None


def is_spike(loss: float, recent: tuple[float, ...]) -> bool:
    """Tell whether a finite loss is a spike; what is not finite has its own rule."""
    z = z_score(loss, recent) if math.isfinite(loss) else None
    return z is not None and z > LIMIT


MOST_NON_FINITE = 4  # in a row: one is an accident, four are a state


def accepts(loss: float, grad_norm: float, state: TrainState, on_spike: str) -> bool:
    """Decide, from numbers that all ranks share, whether an update is made."""
    spiked = is_spike(loss, state.recent_losses)
    return is_finite(loss, grad_norm) and (on_spike == "warn" or not spiked)


def why_host_decides(
    config: Config, optimizers: list[torch.optim.Optimizer], runtime: Runtime
) -> str | None:
    """Return why the loss must be read before the update is made; None if the device can do without.

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
                f"{step - count}. Resume from a checkpoint with a lower --max_lr and --allow_change max_lr"
            )
