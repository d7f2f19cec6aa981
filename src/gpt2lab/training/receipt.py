"""What a resume proves before it goes on: that this is the state, the data and the rate of the run it continues.

Whatever can be compared with what the run itself recorded is compared. A difference is a refusal, and nothing has been
written then: a run that silently reads other tokens has a loss that looks fine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

from gpt2lab.checkpoint import store
from gpt2lab.checkpoint.manifest import read_manifest, verify
from gpt2lab.checkpoint.state import TrainState
from gpt2lab.config.settings import policy_of
from gpt2lab.data.loader import Loader
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import CheckpointError
from gpt2lab.model import rng
from gpt2lab.optim.schedule import lr_at
from gpt2lab.runs import history
from gpt2lab.training.start import Start

# A change of one of these means other batches on purpose.
_DECIDES_BATCHES = {"data", "total_batch_size", "context_length", "shuffle", "seed"}
_ROUNDING = 1e-13  # of a rate: another system's cosine may end in another bit


@dataclass(frozen=True)
class Receipt:
    """What was compared, and what this resume therefore promises."""

    step: int
    level: str  # bit-identical | same data | changed
    worlds: tuple[int, int]  # processes that saved, processes now
    batches: tuple[int, ...]  # steps whose batch was read again, its hash equal to the logged one
    lr: float | None  # of the last step, equal to the logged one; None if nothing was logged
    changes: dict[str, list[Any]]

    def as_event(self) -> dict[str, Any]:
        """Return the fields of the `resume` event."""
        return {
            "from_step": self.step,
            "world_size": self.worlds[1],
            "saved_world_size": self.worlds[0],
            "changes": self.changes,
            "level": self.level,
            "verified_batches": list(self.batches),
            "verified_lr": self.lr,
        }

    def describe(self) -> str:
        """Write the receipt for people."""
        read = " and ".join(str(step) for step in self.batches)
        before, now = self.worlds
        rows = [
            f"resumed from step {self.step} ({self.level})",
            f"  data         batch of step {read} read again: the hash is the logged one"
            if self.batches
            else "  data         nothing logged to compare with",
            "  randomness   follows from seed and step"
            + (", generators as they were saved" if before == now else ""),
            "  rate         " + ("not logged" if self.lr is None else f"{self.lr:.4g}, as logged"),
            f"  processes    {before}" + ("" if before == now else f" -> {now}"),
            "  changed      " + (", ".join(self.changes) or "nothing"),
        ]
        return "\n".join(rows)


def load_state(
    start: Start, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], runtime: Runtime
) -> TrainState:
    """Put the chosen checkpoint into model and optimizers, and return where the run stands.

    Raises: CheckpointError if this process sees other bytes than the one that chose, or they do not fit.
    """
    assert start.checkpoint is not None
    chosen = start.checkpoint
    if read_manifest(chosen.path)["manifest_sha256"] != chosen.manifest["manifest_sha256"]:
        raise CheckpointError(
            f"{chosen.path}: differs between machines; the run's folder must be shared by all"
        )
    if runtime.rank != 0 and runtime.local_rank == 0:
        verify(chosen.path)  # the first process has; another machine may read other bytes
    state, rng_states = store.load(
        chosen.path,
        model=model,
        optimizers=optimizers,
        other_optimizer="optimizer" in start.changes,
    )
    if len(rng_states) == runtime.world_size:
        saved = rng_states[runtime.rank]
        rng.restore(saved, runtime.device)
        found = rng.capture(runtime.device)
        both = found.keys() & saved.keys()  # the GPU's is missing where a run changes its device
        if _as_json(found, both) != _as_json(saved, both):
            raise CheckpointError(f"{chosen.path}: the saved generators do not restore")
    guarded = {name: change for name, change in start.changes.items() if _is_guarded(name, start)}
    if guarded:
        record = {"step": state.step, "attempt": start.attempt, "changes": guarded}
        state = dataclasses.replace(state, history=(*state.history, record))
    if "data" in start.changes:  # other data's sample numbers are other windows: begin at its first
        state = dataclasses.replace(state, samples=0)
    return state


def _as_json(states: dict[str, Any], names: Set[str]) -> str:
    return json.dumps({name: states[name] for name in sorted(names)})


def check_resume(start: Start, state: TrainState, loader: Loader, facts: dict[str, Any]) -> Receipt:
    """Compare the loaded state with what the run recorded. On the first process only.

    Raises: CheckpointError naming what differs.
    """
    assert start.checkpoint is not None
    manifest, logged = start.checkpoint.manifest, _logged_steps(start)
    if (state.step, state.tokens) != (manifest["step"], manifest["tokens"]):
        raise CheckpointError(
            f"{start.checkpoint.path}: its state is of step {state.step}, its manifest of step {manifest['step']}"
        )
    return Receipt(
        step=state.step,
        level=_level(start, facts),
        worlds=(manifest["environment"]["world_size"], start.plan.batch.world_size),
        batches=_compare_batches(start, state, loader, logged),
        lr=_compare_lr(start, state, logged),
        changes=start.changes,
    )


def _logged_steps(start: Start) -> dict[int, dict[str, Any]]:
    """Return what was logged along the run's line: of the step resumed from, and of later ones an earlier start took.

    Without those that took other batches on purpose: after a change of data, or where a rewind skipped some.
    """
    assert start.checkpoint is not None
    events, step = history.read_events(start.run_dir), start.checkpoint.step
    steps = history.current(events, "step")
    turned = any(
        event["step"] == step
        and (event["event"] == "rewind" or _DECIDES_BATCHES & set(event.get("changes", ())))
        for event in events
        if event["event"] in ("resume", "rewind")
    )
    return {number: event for number, event in steps.items() if number <= step or not turned}


def _compare_batches(
    start: Start, state: TrainState, loader: Loader, logged: dict[int, dict[str, Any]]
) -> tuple[int, ...]:
    """Read the last batch, and the next one if an earlier start took it, and compare their hashes."""
    if _DECIDES_BATCHES & set(start.changes):
        return ()
    compared = []
    for step, first in (
        (state.step, state.samples - start.plan.batch.samples),
        (state.step + 1, state.samples),
    ):
        event = logged.get(step)
        if event is None or first < 0 or event.get("batch_hash") is None:
            continue
        found = loader.fetch(first).hash
        if found != event["batch_hash"]:
            raise CheckpointError(
                f"step {step} would read another batch than the one logged (sha256 {str(found)[:12]}, logged "
                f"{event['batch_hash'][:12]}): the data changed or metrics.jsonl is of another run; restore them, "
                f"or resume with --allow_change data"
            )
        compared.append(step)
    return tuple(compared)


def _compare_lr(start: Start, state: TrainState, logged: dict[int, dict[str, Any]]) -> float | None:
    """Compare the schedule's rate of the last step with the one it was trained with."""
    event = logged.get(state.step)
    if event is None or any(_is_guarded(name, start) for name in start.changes):
        return None
    lr = lr_at(state.step, start.config.optim, max_steps=start.plan.max_steps)
    if not math.isclose(lr, event["lr"], rel_tol=_ROUNDING):
        raise CheckpointError(
            f"the learning rate of step {state.step} would be {lr!r}, it was trained with {event['lr']!r}: "
            f"metrics.jsonl or config is of another run, or of another version of the schedule"
        )
    return lr


def _level(start: Start, facts: dict[str, Any]) -> str:
    """Say what this resume promises: the same bits, the same data, or a run that was changed on purpose."""
    assert start.checkpoint is not None
    if any(_is_guarded(name, start) for name in start.changes):
        return "changed"
    now, saved = dict(facts["environment"]), dict(start.checkpoint.manifest["environment"])
    if start.config.system.reduce == "exact":  # the sum's order is that of one process
        now.pop("world_size"), saved.pop("world_size", None)
    return "bit-identical" if now == saved and now["deterministic"] else "same data"


def _is_guarded(name: str, start: Start) -> bool:
    return name == "data" or policy_of(name, start.config) == "guarded"
