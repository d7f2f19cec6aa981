"""Go back before a loss spike and leave out the data that led to it. Chowdhery et al. 2022 (PaLM), section 5.1."""

from __future__ import annotations

import dataclasses

from gpt2lab.checkpoint import catalog, store
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.checkpoint.state import TrainState
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.errors import CheckpointError, NonFiniteError
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.components import Components
from gpt2lab.training.start import Start

BACK = 100  # steps before the spike, where there is a checkpoint that old: later weights may be bent already
MOST = 10  # rewinds of one run; what needs more is no accident


def rewind(
    components: Components,
    state: TrainState,
    batch: GlobalBatch,
    loss: float,
    logger: MetricsLogger,
) -> TrainState | None:
    """Load an earlier checkpoint and move on past the batch that spiked; None if there is no checkpoint.

    The samples left out are recorded in the state, which alone decides the next sample: a run that is killed and
    resumed, or repeated, takes the same way.

    Raises: NonFiniteError after too many; CheckpointError if the checkpoint does not load.
    """
    start, runtime = components.start, components.runtime
    spike, jumped = state.step + 1, batch.first_sample + batch.samples
    if sum(record["reason"] == "rewind" for record in state.skipped) >= MOST:
        raise NonFiniteError(
            f"step {spike}: the loss spiked again after {MOST} rewinds; "
            f"resume from an earlier checkpoint with a lower --max_lr and --allow_change max_lr"
        )
    chosen = runtime.on_rank_zero(lambda: _choose(start, spike))
    if chosen is None:
        return None
    loaded, _ = runtime.on_all_ranks(
        lambda: store.load(chosen.path, model=components.model, optimizers=components.optimizers)
    )
    record = {"step": spike, "reason": "rewind", "samples": [loaded.samples, jumped]}
    logger.event("rewind", chosen.step, spike_step=spike, loss=loss, samples=record["samples"])
    logger.warn(
        f"step {spike}: loss {loss:.4f} is a spike; back to step {chosen.step}, "
        f"and on without the {jumped - loaded.samples:,} windows up to it",
        chosen.step,
    )
    if runtime.rank == 0:
        catalog.supersede(start.run_dir, chosen.step)
    return dataclasses.replace(
        loaded,
        samples=jumped,
        train_seconds=state.train_seconds,
        skipped=(*state.skipped, record),
    )


def _choose(start: Start, spike: int) -> CheckpointInfo | None:
    """Return the newest intact checkpoint that is old enough, else the newest intact one."""
    infos = [info for info in catalog.list_checkpoints(start.run_dir)[0] if info.step < spike]
    old_enough = [info for info in infos if info.step <= spike - BACK]
    for info in (*reversed(old_enough), *reversed(infos)):
        try:
            return catalog.open_checkpoint(info.path)
        except CheckpointError:
            continue
    return None
