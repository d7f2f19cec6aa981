"""Save a checkpoint: gather, write, label, retire old ones, report; and handle a failed write."""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from gpt2lab import fmt
from gpt2lab.checkpoint import catalog, store
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.checkpoint.state import TrainState
from gpt2lab.errors import CheckpointError, GPT2LabError, NonFiniteError, SaveError
from gpt2lab.model import rng
from gpt2lab.runs.folder import RunFolder
from gpt2lab.training.components import Components, Session
from gpt2lab.training.stop import Signals

_ROOM = 1.2  # free disk before a save, in checkpoints: headers, state, and what others write


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(self, components: Components, session: Session, signals: Signals) -> None:
        start = components.start
        self.config, self.run_dir = start.config.checkpoint, start.run_dir
        self.folder, self.logger, self.signals = session.folder, session.logger, signals
        self.mirror = session.mirror
        self.model, self.optimizers = components.model, components.optimizers
        self.runtime, self.facts = components.runtime, components.facts
        self.tokenizer_files = start.tokenizer_files
        self.resumed_from = start.checkpoint.step if start.checkpoint else None
        self.resumed_kind = start.checkpoint.kind if start.checkpoint else None

    def save(
        self, state: TrainState, kind: str, labels: list[str], *, must_succeed: bool
    ) -> tuple[bool, float]:
        """Commit a checkpoint of exactly `state.step`; tell whether that worked, and the seconds it took.

        A failed write is a warning, and training continues; where the process is about to end (`must_succeed`) it is
        an error.

        Raises: SaveError on all ranks.
        """
        began = time.monotonic()
        rng_states = self.runtime.gather(rng.capture(self.runtime.device))
        content = store.collect(self.model, self.optimizers, keep=self.folder is not None)
        failure = self.runtime.on_rank_zero(
            lambda: self._write(state, kind, labels, content, rng_states, began)
        )
        if failure is not None and must_succeed:
            raise SaveError(
                f"{failure}; free space, or repair the disk, and resume from the checkpoint before"
            )
        if failure is not None:
            self.logger.warn(f"{failure}; training goes on, the next is due as planned", state.step)
        return failure is None, time.monotonic() - began

    def rescue(self, state: TrainState) -> bool:
        """Save the last complete step when an error ends this rank, without communication; return whether it worked.

        Sharded state cannot be saved this way. The rank that holds the run's lock writes: rank 0, or a survivor of its
        death.
        """
        opened: RunFolder | None = None
        began, label = time.monotonic(), f"emergency_{state.step:08d}"
        try:
            folder = self.folder or (opened := RunFolder(self.run_dir))
            folder.check_lock()
            if state.step == 0 or store.is_spread_out(self.model, self.optimizers):
                return False
            # Behind a collective that hangs, the GPU's usual stream would never come to the copies.
            with own_stream(self.runtime.device):
                content = store.collect(self.model, self.optimizers, keep=True)
            if not content.is_finite:
                return False
            with suppress(GPT2LabError):  # the weights are worth more than the last lines
                self.logger.flush()
            self._commit(state, "emergency", content, [rng.capture(self.runtime.device)])
            catalog.set_label(folder.path, label, state.step)
            if self.mirror is not None:
                self.mirror.notify_saved()
        except (OSError, RuntimeError, MemoryError, GPT2LabError):
            return False  # the first error is the one to report
        finally:
            if opened:
                opened.close()
        with suppress(OSError, GPT2LabError):  # the checkpoint stands without its event
            self._report(state, "emergency", [label], time.monotonic() - began)
        return True

    def report_mirror(self, step: int) -> None:
        """Pass on what the mirror has to say: to status.json, and a warning of each kind of error."""
        if (
            self.mirror is None
            or self.folder is None
            or (news := self.mirror.take_report()) is None
        ):
            return
        report, warnings = news
        for warning in warnings:
            self.logger.warn(warning, step)
        try:
            self.folder.add_to_status(mirror=report.to_dict())
        except OSError as error:
            self.logger.warn(f"status.json: {error.strerror}", step)

    def complete(self, state: TrainState, labels: list[str], *, is_recorded: bool) -> None:
        """Give the checkpoint resumed from the labels and the event that it lacks after a kill between them."""
        self.label(state.step, labels)
        if self.folder is not None and self.resumed_kind is not None and not is_recorded:
            self._record(state, self.resumed_kind, labels, seconds=None)

    def label(self, step: int, labels: list[str]) -> None:
        """Point labels at a step that is on disk; a failure is a warning, the checkpoint stands without."""
        if self.folder is not None:
            for problem in self._set_labels(step, labels):
                self.logger.warn(problem, step)

    def require_labels(self, step: int, labels: list[str]) -> None:
        """Point labels at the last step: without them a run is not complete.

        Raises: SaveError on all ranks.
        """
        problems = self.runtime.on_rank_zero(lambda: self._set_labels(step, labels))
        if problems:
            raise SaveError(f"{problems[0]}; free space, or repair the disk, and resume")

    def _set_labels(self, step: int, labels: list[str]) -> list[str]:
        """Set the labels that do not point at the step yet; return what went wrong."""
        known, problems = catalog.read_labels(self.run_dir), []
        for label in labels:
            if known.get(label) == folder_name(step):
                continue
            try:
                faultpoint("checkpoint.before_label", step)
                catalog.set_label(self.run_dir, label, step)
            except OSError as error:
                problems.append(f"label {label} of step {step} not set: {error}")
        return problems

    def _write(
        self,
        state: TrainState,
        kind: str,
        labels: list[str],
        content: store.Content,
        rng_states: list[dict[str, Any]],
        began: float,
    ) -> str | None:
        """Write, label and report on rank 0; return what went wrong, or None."""
        assert self.folder is not None
        if (warning := self.folder.check_lock()) is not None:
            self.logger.warn(warning, state.step)
        if not content.is_finite:
            raise NonFiniteError(
                f"step {state.step}: the weights are not finite and were not saved; "
                f"resume from a checkpoint with a lower --max_lr and --allow_change max_lr"
            )
        if (problem := self._make_room() or self.logger.flush()) is not None:
            return f"checkpoint of step {state.step} not saved: {problem}"
        is_flushed = True
        try:
            with self.signals.committing():
                self._commit(state, kind, content, rng_states)
        except OSError as error:
            if not (self.run_dir / folder_name(state.step)).exists():  # else the commit stands
                return f"checkpoint of step {state.step} not saved: {error}"
            is_flushed = False
            self.logger.warn(
                f"checkpoint of step {state.step}: {error}; a power cut may lose it, so that older ones stay",
                state.step,
            )
        self.label(state.step, labels)
        faultpoint("checkpoint.after_label", state.step)
        self._report(state, kind, labels, time.monotonic() - began)
        if self.mirror is not None:
            self.mirror.notify_saved()
        try:
            # Asked twice: the disk can be tidied by the next start.
            if is_flushed and self.signals.level < 2:
                self._retain(self.config.keep_checkpoints, self.config.keep_emergency_checkpoints)
            self.folder.write_status("running", step=state.step)
        except (OSError, CheckpointError) as error:
            self.logger.warn(f"after the checkpoint of step {state.step}: {error}", state.step)
        return None

    def _commit(
        self, state: TrainState, kind: str, content: store.Content, rng_states: list[dict[str, Any]]
    ) -> None:
        store.save(
            self.run_dir,
            kind=kind,
            content=content,
            state=state,
            rng_states=rng_states,
            facts=self.facts,
            files=self.tokenizer_files,
        )

    def _retain(self, keep: int, keep_emergency: int) -> None:
        catalog.retain(
            self.run_dir, keep=keep, keep_emergency=keep_emergency, resumed_from=self.resumed_from
        )

    def _make_room(self) -> str | None:
        """Make room for a checkpoint by retiring old ones early; return what is missing, or None."""
        needed = _ROOM * store.num_bytes(self.model, self.optimizers)
        if shutil.disk_usage(self.run_dir).free >= needed:
            return None
        with suppress(OSError, CheckpointError):  # what cannot be tidied shows in the free space
            catalog.sweep(self.run_dir)
            self._retain(max(1, self.config.keep_checkpoints - 1), 1)
        free = shutil.disk_usage(self.run_dir).free
        if free >= needed:
            return None
        return f"{fmt.num_bytes(free)} free on its disk, {fmt.num_bytes(needed)} needed"

    def _record(
        self, state: TrainState, kind: str, labels: list[str], *, seconds: float | None
    ) -> int:
        """Write the event of a checkpoint and return its bytes; `seconds` None: nobody measured how long it took."""
        path = self.run_dir / folder_name(state.step)
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        self.logger.event(
            "checkpoint",
            state.step,
            path=str(path),
            kind=kind,
            labels=labels,
            bytes=num_bytes,
            seconds=seconds,
        )
        return num_bytes

    def _report(self, state: TrainState, kind: str, labels: list[str], seconds: float) -> None:
        num_bytes = self._record(state, kind, labels, seconds=seconds)
        named = f" ({', '.join(labels)})" if labels else ""
        self.logger.say(
            f"step {state.step} | saved {kind} checkpoint{named}: {folder_name(state.step)}, "
            f"{fmt.num_bytes(num_bytes)} in {seconds:.1f} s"
        )


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Have a GPU do what is asked within beside, not behind, what it was asked before."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
