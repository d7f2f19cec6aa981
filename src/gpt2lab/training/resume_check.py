"""Check, before a resume continues, that state, data and learning rate are those of the run.

A difference from what the run recorded is an error, before anything is written: a run that silently reads other tokens
has a loss that looks fine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpt2lab.checkpoint import store
from gpt2lab.checkpoint.manifest import read_manifest, verify
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.settings import policy_of, record
from gpt2lab.data.loader import Loader
from gpt2lab.distributed.processor import cpu_name
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import CheckpointError, first_line
from gpt2lab.model import rng
from gpt2lab.optim.schedule import lr_at
from gpt2lab.runs import history
from gpt2lab.runs.folder import provenance
from gpt2lab.tokenizers.opening import record_of
from gpt2lab.training.start import Start

# A change of one of these means other batches on purpose.
_DECIDES_BATCHES = {
    *("data", "data_weights_at", "total_batch_size", "context_length", "shuffle", "seed"),
    *("packing", "val_fraction"),  # of conversations
}
_ROUNDING = 1e-13  # of a rate: another system's cosine may end in another bit


@dataclass(frozen=True)
class ResumeCheck:
    """What was compared, and what this resume promises: the fields of the `resume` event."""

    from_step: int
    world_size: int
    saved_world_size: int
    changes: dict[str, list[Any]]
    level: str  # bit-identical | same data | changed
    verified_batches: list[int]  # steps whose batch was read again: its hash is the logged one
    verified_lr: float | None  # of the last step, as logged; None if nothing was logged

    def describe(self) -> str:
        """Format the result for the console."""
        read, lr = " and ".join(map(str, self.verified_batches)), self.verified_lr
        if len(self.verified_batches) > 2:
            read = f"{self.verified_batches[0]} to {self.verified_batches[-1]}"
        data = rate = "nothing logged to compare with"
        if read:
            data = f"batch of step {read} read again: the hash is the logged one"
        elif others := _DECIDES_BATCHES & self.changes.keys():
            data = f"other batches from here on: {', '.join(sorted(others))} changed"
        if lr is not None:
            rate = f"{lr:.4g}, as logged"
        elif self.level == "changed":
            rate = "not compared with the log, because settings changed"
        before, now = self.saved_world_size, self.world_size
        return (
            f"resumed from step {self.from_step} ({self.level})\n"
            f"  data         {data}\n"
            f"  randomness   follows from seed and step"
            f"{', generators as they were saved' if before == now else ''}\n"
            f"  rate         {rate}\n"
            f"  world size   {before if before == now else f'{before} -> {now}'}\n"
            f"  changed      {', '.join(self.changes) or 'nothing'}"
        )


def load_state(
    start: Start, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], runtime: Runtime
) -> TrainState:
    """Put the chosen checkpoint into model and optimizers, and return the run's state.

    Raises: CheckpointError if this rank sees other bytes than rank 0, or they do not fit.
    """
    assert start.checkpoint is not None
    chosen = start.checkpoint
    if read_manifest(chosen.path)["manifest_sha256"] != chosen.manifest["manifest_sha256"]:
        raise CheckpointError(
            f"{chosen.path}: differs between machines; the run's folder must be shared by all"
        )
    if runtime.rank != 0 and runtime.local_rank == 0:
        verify(chosen.path)  # rank 0 has; another machine may read other bytes
    is_other = "optimizer" in start.changes
    state, rng_states = store.load(
        chosen.path, model=model, optimizers=optimizers, other_optimizer=is_other
    )
    for name in ("step", "tokens", "samples"):
        here, there = getattr(state, name), chosen.manifest.get(name)
        if there not in (None, here):
            raise CheckpointError(
                f"{chosen.path}: its state says {name} {here}, its manifest {there}"
            )
    # A rank that saves alone after another died has only its own generators; no random number of a step depends
    # on them.
    is_rescued = chosen.manifest["kind"] == "emergency" and len(rng_states) == 1
    if len(rng_states) != chosen.manifest["environment"]["world_size"] and not is_rescued:
        raise CheckpointError(f"{chosen.path}: has generators of {len(rng_states)} ranks, not all")
    if len(rng_states) == runtime.world_size:
        saved = rng_states[runtime.rank]
        try:
            rng.restore(saved, runtime.device)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"{chosen.path}: the saved generators do not restore ({first_line(error)})"
            ) from error
        found = rng.capture(runtime.device)
        both = found.keys() & saved.keys()  # the GPU's is missing where a run changes its device
        if any(json.dumps(found[name]) != json.dumps(saved[name]) for name in both):
            raise CheckpointError(f"{chosen.path}: the saved generators do not restore")
    if guarded := _guarded_changes(start):
        record = {"step": state.step, "attempt": start.attempt, "changes": guarded}
        state = dataclasses.replace(state, history=(*state.history, record))
    if start.changes.keys() & history.DECIDES_VALIDATION:  # losses before are of other windows
        state = dataclasses.replace(state, best_val_loss=None, best_step=None, best_from=state.step)
    if "data" in start.changes:  # sample numbers mean other windows: begin at the first
        state = dataclasses.replace(state, samples=0)
    return state


def check_resume(
    start: Start, state: TrainState, loader: Loader, facts: dict[str, Any]
) -> ResumeCheck:
    """Compare the loaded state with what the run recorded. On rank 0 only.

    Raises: CheckpointError naming what differs.
    """
    assert start.checkpoint is not None
    log = history.read_log(start.checkpoint.path.parent)
    return ResumeCheck(
        from_step=state.step,
        world_size=start.plan.batch.world_size,
        saved_world_size=saved_environment(start)["world_size"],
        changes=start.changes,
        level=_level(start, facts),
        verified_batches=_compare_batches(start, state, loader, log),
        verified_lr=_compare_lr(start, state, log.step(state.step)),
    )


def _turns(log: history.Log) -> list[int]:
    """Return the steps after which other batches came on purpose: after a change of data or a rewind."""
    return [
        event["step"]
        for event in log.of_kind("resume", "rewind")
        if event["event"] == "rewind" or _DECIDES_BATCHES & set(event.get("changes", ()))
    ]


def _logged_batches(
    start: Start, state: TrainState, loader: Loader, log: history.Log
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield logged steps, and the first sample that each reads.

    These are the step resumed from, and the next one if an earlier start took it on the same batch. If the checkpoint
    names unverified shards, whose files may be others now, the steps before that read them come first, back to the last
    save that waited for hashes.
    """
    size, turns = start.plan.batch.samples, _turns(log)
    shards = enumerate(loader.reader.shards)
    doubtful = [index for index, shard in shards if shard.path.name in state.unverified]
    kinds = {step: event.get("kind") for step, event in log.current("checkpoint").items()}
    saves = (step for step, kind in kinds.items() if kind != "emergency")
    known = max((step for step in (*saves, *turns) if step < state.step), default=0)
    for step in range(known + 1 if doubtful else state.step, state.step):
        event = log.step(step)
        if event is not None and (first := event.get("first_sample")) is not None:
            read = loader.order.locate(np.arange(first, first + size))[0]
            if np.isin(read, doubtful).any():
                yield event, first
    for step, first in ((state.step, state.samples - size), (state.step + 1, state.samples)):
        event = log.step(step)
        if event is not None and first >= 0 and not (step > state.step and state.step in turns):
            yield event, first


def _compare_batches(
    start: Start, state: TrainState, loader: Loader, log: history.Log
) -> list[int]:
    """Read the batches of logged steps again, and compare their hashes."""
    if _DECIDES_BATCHES & set(start.changes):
        return []
    compared = []
    for event, first in _logged_batches(start, state, loader, log):
        if event.get("batch_hash") is None:
            continue
        found = loader.fetch(first).hash
        if found != event["batch_hash"]:
            raise CheckpointError(
                f"step {event['step']} would read another batch than the one logged (sha256 {str(found)[:12]}, logged "
                f"{event['batch_hash'][:12]}): the data changed or metrics.jsonl is of another run; restore them, "
                f"or let gpt2lab data import write a shards.json for the new data and resume with --allow_change data"
            )
        compared.append(event["step"])
    return compared


def _compare_lr(start: Start, state: TrainState, event: dict[str, Any] | None) -> float | None:
    """Compare the schedule's rate of the last step, and fp16's loss scale after it, with those of its event."""
    if event is None or event.get("lr") is None or _guarded_changes(start):
        return None
    lr = lr_at(state.step, start.config.optim, max_steps=start.plan.max_steps)
    if not math.isclose(lr, event["lr"], rel_tol=_ROUNDING):
        raise CheckpointError(
            f"the learning rate of step {state.step} would be {lr!r}, it was trained with {event['lr']!r}: "
            f"metrics.jsonl or config is of another run, or of another version of the schedule"
        )
    saved, scale = state.loss_scale and state.loss_scale[0], event.get("loss_scale")
    if saved != scale:
        raise CheckpointError(
            f"the loss scale after step {state.step} is {saved}, logged {scale}: metrics.jsonl is of another run"
        )
    return lr


def _level(start: Start, facts: dict[str, Any]) -> str:
    """Say what this resume promises: the same bits, the same data, or a run that was changed on purpose."""
    if _guarded_changes(start):
        return "changed"
    now, saved = dict(facts["environment"]), dict(saved_environment(start))
    if start.config.system.reduce == "exact":  # the order of the sum does not depend on it
        now.pop("world_size"), saved.pop("world_size", None)
    return "bit-identical" if now == saved and now["deterministic"] else "same data"


def saved_environment(start: Start) -> dict[str, Any]:
    """Return what the checkpoint's manifest says that it was trained on."""
    assert start.checkpoint is not None
    found: dict[str, Any] = start.checkpoint.manifest["environment"]
    return found


def describe_other_environment(start: Start, facts: dict[str, Any]) -> str | None:
    """Return a warning if torch, processor, threads or a GPU's kernels are not those of the checkpoint, else None."""
    saved, now = saved_environment(start), facts["environment"]
    names = ("torch", "device", "threads", "attention", "loss_kernel")
    other = [
        f"{'processor' if name == 'device' else name} {saved.get(name)!r:.60} -> {now.get(name)!r}"
        for name in names
        # as JSON: True is not 1
        if json.dumps(saved.get(name)) != json.dumps(now.get(name))
    ]
    if not other:
        return None
    return f"resumed on another system than saved ({', '.join(other)}): last bits of losses differ"


def _guarded_changes(start: Start) -> dict[str, list[Any]]:
    return {
        name: change
        for name, change in start.changes.items()
        if name == "data" or policy_of(name, start.config) == "guarded"
    }


def facts_of(start: Start, runtime: Runtime) -> dict[str, Any]:
    """Return what every manifest of this start records besides the state: settings, data, environment."""
    on_gpu, system = runtime.device.type == "cuda", start.config.system
    environment = {
        "device": torch.cuda.get_device_name(runtime.device) if on_gpu else cpu_name(),
        "world_size": runtime.world_size,
        "threads": torch.get_num_threads(),
        "mini_batch_size": start.config.batch.mini_batch_size,
        "dtype": system.dtype,
        "compile": system.compile,
        "parallel": system.parallel,
        "ddp_bucket_mb": system.ddp_bucket_mb,
        "deterministic": system.deterministic or not on_gpu,
        "torch": torch.__version__,
    }
    kernels = {"attention": start.attention, "loss_kernel": start.loss_kernel}
    environment |= {name: kernel for name, kernel in kernels.items() if kernel is not None}
    before = start.checkpoint.manifest if start.checkpoint else {}
    initial = start.initial.record() if start.initial else before.get("initial_weights")
    return {
        "run": start.run_dir.name,
        "attempt": start.attempt,
        "config": record(start.config, start.chosen),
        "data_fingerprint": start.data.fingerprint,
        "tokenizer": record_of(start.data.tokenizer),
        "order_version": start.order.version,
        "environment": environment,
        "on_gpu": on_gpu,
        "initial_weights": initial,
        "branch_from": start.branch or before.get("branch_from"),
        "provenance": provenance(torch.__version__) if runtime.rank == 0 else {},
    }
