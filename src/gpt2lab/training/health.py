"""Which updates are made, and what is said about those that were not."""

from __future__ import annotations

from gpt2lab.checkpoint.state import TrainState
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.errors import NonFiniteError
from gpt2lab.runs.logger import Telemetry
from gpt2lab.training.spikes import is_spike
from gpt2lab.training.train_step import StepStats, is_finite

MOST_NON_FINITE = 4  # in a row: one is an accident, four are a state


def accepts(loss: float, grad_norm: float, state: TrainState, on_spike: str) -> bool:
    """Decide, from numbers that all processes share, whether an update is made."""
    spiked = is_spike(loss, state.recent_losses)
    return is_finite(loss, grad_norm) and (on_spike == "warn" or not spiked)


def report_health(
    state: TrainState, stats: StepStats, batch: GlobalBatch, telemetry: Telemetry, *, spiked: bool
) -> None:
    """Report a refused update or a spike of the step just done.

    Raises: NonFiniteError when too many updates in a row were not finite.
    """
    step, samples = state.step, f"samples {batch.first_sample} on"
    if spiked:
        done = "its update was made" if stats.updated else "its update was skipped"
        telemetry.warn(f"step {step}: loss {stats.loss:.4f} is a spike ({samples}); {done}", step)
    elif not stats.updated:
        count = state.non_finite_in_a_row
        telemetry.warn(
            f"step {step}: loss {stats.loss}, gradient norm {stats.grad_norm} ({samples}); "
            f"the update was skipped, {count} in a row",
            step,
        )
        if count >= MOST_NON_FINITE:
            raise NonFiniteError(
                f"step {step}: {count} updates in a row were not finite; the weights are as after step "
                f"{step - count}. Resume from a checkpoint with a lower --max_lr and --allow_change max_lr"
            )
