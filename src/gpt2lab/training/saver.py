"""Save a checkpoint: gather, write, label, retire old ones, report; and handle a failed write.

Training waits while a checkpoint is written; with `--async_checkpoint` a thread writes it, and training waits only for
a copy in memory. At most one save is in flight, and what reads, labels or retires checkpoints waits for it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from gpt2lab import fmt
from gpt2lab.checkpoint import catalog, manifest, store
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.manifest import Draft, folder_name
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.derived import saves_in_background
from gpt2lab.config.request import LOWER_RATE
from gpt2lab.errors import CheckpointError, FolderLostError, GPT2LabError, NonFiniteError, SaveError
from gpt2lab.model import rng
from gpt2lab.runs.folder import RunFolder
from gpt2lab.training.components import Components, Session

_ROOM = 1.2  # free disk before a save, in checkpoints: headers, state, and what others write


@dataclass
class _Save:
    """A checkpoint that is being written."""

    state: TrainState
    kind: str
    labels: list[str]
    began: float = field(default_factory=time.monotonic)
    stalled: float = 0.0  # seconds that training has waited for its thread so far
    thread: threading.Thread | None = None  # that writes it; None: training waits
    ended: float = 0.0  # moment at which the thread had written it, on the monotonic clock
    error: Exception | None = None  # of the thread


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(self, components: Components, session: Session) -> None:
        start = components.start
        self.components = components
        self.settings, self.run_dir = start.config.checkpoint, start.run_dir
        self.folder, self.logger = session.folder, session.logger
        self.signals = session.control.signals
        self.model, self.optimizers = components.model, components.optimizers
        self.runtime = components.runtime
        self.resumed_from = start.checkpoint.step if start.checkpoint else None
        self.resumed_kind = start.checkpoint.kind if start.checkpoint else None
        on_gpu = self.runtime.device.type == "cuda"
        self.is_async = saves_in_background(self.settings, on_gpu=on_gpu)
        self._buffer: store.StagingBuffer | None = None  # on rank 0, from the first save on
        self._in_flight: _Save | None = None
        self._is_on_disk = True  # the newest save that has ended
        begun = start.branch or (start.checkpoint and start.checkpoint.manifest.get("branch_from"))
        self._branched_at = begun["step"] if begun else 0
        self._has_lost_best = False  # the save of the best weights failed
        # Seconds of the longest save by a thread, and of the last one that training waited for to its end; until one
        # has ended, those of the last start's.
        self._longest = self._waited = start.last_save_seconds
        self._lock = threading.RLock()  # of what is in flight: the heartbeat's thread rescues
        self.signals.is_writing = self.is_writing

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: Any
    ) -> None:
        """Wait for a save in flight; after an error as far as possible."""
        with suppress(*() if error is None else (Exception,)):  # the first one is to be reported
            try:
                if not isinstance(error, FolderLostError):  # then it gives up by itself
                    self.settle()
            finally:
                with self._lock:
                    self._in_flight = None
                    self._free_buffer()

    def save(
        self, state: TrainState, kind: str, labels: list[str], *, must_succeed: bool
    ) -> float | None:
        """Commit a checkpoint of exactly `state.step`, or leave that to a thread.

        Return the seconds for which training waited; None on all ranks if the write failed. That is a warning, and
        training continues; where the process is about to end (`must_succeed`) it is an error, and nothing is left in
        flight.

        Raises: SaveError on all ranks.
        """
        began = time.monotonic()
        self.settle()  # the save before; its buffer is used again
        save = _Save(state, kind, labels)
        rng_states = self.runtime.gather(rng.capture(self.runtime.device))
        content = self._collect(state.step)

        def write() -> tuple[str | None, bool, float | None]:
            failure = self._write(save, content, rng_states, must_succeed=must_succeed)
            return failure, self._in_flight is not None, self._longest

        failure, is_in_flight, self._longest = self.runtime.on_rank_zero(write)
        if failure is not None and must_succeed:
            has_saved = catalog.has_checkpoints(self.run_dir)
            again = "resume from the checkpoint before" if has_saved else "start again"
            raise SaveError(f"{failure}; free space, or repair the disk, and {again}")
        if failure is not None:
            self._warn_of_failure(failure, state.step)
            return None
        stalled = time.monotonic() - began
        if not is_in_flight:
            self._waited = stalled
        return stalled

    @property
    def stop_seconds(self) -> float | None:
        """Seconds that a stop must allow for its save; None while that is unknown.

        It may first wait for a save in flight, which may begin at any step, then saves its own step.
        """
        return 2 * self._longest if self.is_async and self._longest is not None else self._waited

    def _warn_of_failure(self, failure: str, step: int) -> None:
        self.logger.warn(f"{failure}; training continues, the next save is due as planned", step)

    # -- a save in flight ----------------------------------------------------------------------------------------

    def is_writing(self) -> bool:
        """Tell whether a thread is writing a checkpoint."""
        save = self._in_flight
        return save is not None and save.thread is not None and save.thread.is_alive()

    def poll(self) -> None:
        """Conclude the save in flight if it has ended; waits for nothing."""
        if self._in_flight is not None and not self.is_writing():
            self.settle()

    def join(self) -> bool:
        """Wait on all ranks until nothing is in flight; return whether the newest save is on disk."""
        return self.runtime.on_rank_zero(self.settle)

    def settle(self) -> bool:
        """Wait until this rank has nothing in flight, and conclude it; return whether the newest save is on disk."""
        with self._lock:
            save = self._in_flight
            if save is None or save.thread is None:
                return self._is_on_disk
            began = time.monotonic()
            save.thread.join()
            self._in_flight = None
            if save.error is not None and not isinstance(save.error, OSError):
                raise save.error
            try:
                assert self.folder is not None
                self.folder.check_lock()
            except FolderLostError:  # the loop's next look ends all ranks for that
                self._is_on_disk = False
                return False
            save.stalled += time.monotonic() - began
            self._longest = max(self._longest or 0.0, save.ended - save.began)
            if (failure := self._conclude(save, save.error)) is not None:
                self._warn_of_failure(failure, save.state.step)
            return self._is_on_disk

    def has(self, step: int) -> bool:
        """Tell without communication whether a step's checkpoint is on disk; one in flight is waited for."""
        with suppress(OSError, RuntimeError, GPT2LabError):
            self.settle()
        return (self.run_dir / folder_name(step)).exists()

    def _collect(self, step: int) -> store.Content:
        """Gather the tensors of all ranks; for a save by a thread into memory that no step changes."""
        keep = self.folder is not None
        if self.is_async and keep:
            needed = store.staging_bytes(self.model, self.optimizers)
            try:
                # A second time only if the optimizer had no state yet at the first save.
                if self._buffer is None or self._buffer.num_bytes < needed:
                    self._free_buffer()
                    on_gpu = self.runtime.device.type == "cuda"
                    self._buffer = store.StagingBuffer(needed, pin=on_gpu)
                    size = fmt.num_bytes(needed)
                    self.logger.say(f"step {step} | {size} of memory for asynchronous checkpoints")
            except OSError as error:  # there is not that much memory
                self.is_async = False
                self.logger.warn(f"no asynchronous checkpoints, training waits: {error}", step)
        return store.collect(self.model, self.optimizers, keep=keep, into=self._buffer)

    def _draft(
        self, save: _Save, content: store.Content, rng_states: list[dict[str, Any]]
    ) -> Draft:
        return store.draft(
            self.run_dir,
            save.kind,
            content,
            save.state,
            rng_states,
            facts=self.components.facts | {"average_from": self.components.average.begin},
            files=self.components.start.tokenizer_files,
        )

    def _free_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _leave(self, save: _Save, draft: Draft) -> bool:
        """Leave a save to a thread; return False if there is no room for one."""
        assert self.folder is not None
        may_rename = self.folder.require_lock  # another start may take the folder meanwhile

        def write() -> None:
            try:
                manifest.commit(self.run_dir, draft, may_rename=may_rename)
            except Exception as error:  # the trainer raises it
                save.error = error
            save.ended = time.monotonic()

        save.thread = threading.Thread(target=write, name="checkpoint writer", daemon=True)
        try:
            save.thread.start()
        except RuntimeError:
            return False
        save.stalled = time.monotonic() - save.began
        self._in_flight = save
        return True

    # -- rescue, labels, writing -----------------------------------------------------------------------------------

    def rescue(self, state: TrainState, has_moved: Callable[[], bool]) -> bool:
        """Save the last complete step when an error ends this rank, without communication; return whether it worked.

        Sharded state cannot be saved this way. The rank that holds the run's lock writes: rank 0, or a survivor of its
        death. `has_moved` tells, once the weights are copied, whether the device may have begun to change them.
        """
        opened: RunFolder | None = None
        label = f"emergency_{state.step:08d}"
        save = _Save(state, "emergency", [label])
        try:
            folder = self.folder or (opened := RunFolder(self.run_dir))
            folder.check_lock()
            self.settle()
            if state.step == 0 or store.has_sharded_state(self.model, self.optimizers):
                return False
            needed = store.staging_bytes(self.model, self.optimizers)
            # A GPU copies faster into the buffer; it is too small while the only save had no moments.
            fits = self._buffer is not None and self._buffer.num_bytes >= needed
            into = self._buffer if fits else None
            # If a collective hangs, the GPU's usual stream would never reach the copies, and CUDA would not load a
            # kernel that was never launched before.
            with own_stream(self.runtime.device):
                content = store.collect(
                    self.model, self.optimizers, keep=True, into=into, only_copies=True
                )
            if has_moved() or not store.all_finite(*content.model.values()):
                return False
            with suppress(GPT2LabError):  # the weights are worth more than the last lines
                self.logger.flush()
            draft = self._draft(save, content, [rng.capture(self.runtime.device)])
            manifest.commit(self.run_dir, draft)
            catalog.set_label(folder.path, label, state.step)
        except (OSError, RuntimeError, MemoryError, GPT2LabError):
            return False  # the first error is the one to report
        finally:
            if opened:
                opened.close()
        with suppress(OSError, GPT2LabError):  # the checkpoint is complete without its event
            seconds = time.monotonic() - save.began
            self._report(save, seconds, seconds)
        return True

    def complete(self, state: TrainState, labels: list[str], *, is_recorded: bool) -> None:
        """Give the checkpoint resumed from the labels and the event that it lacks after a kill between them."""
        if not (self.run_dir / folder_name(state.step)).exists():
            return  # of a branch: the checkpoint is another run's
        self.label(state.step, labels)
        if self.folder is not None and self.resumed_kind is not None and not is_recorded:
            self._report(_Save(state, self.resumed_kind, labels))

    def label(self, step: int, labels: list[str]) -> None:
        """Point labels at a step that is on disk; a failure is a warning: the checkpoint is complete without them."""
        if self.folder is not None:
            for problem in self._set_labels(step, labels):
                self.logger.warn(problem, step)

    def best_left(self, state: TrainState) -> tuple[int, float | None] | tuple[None, None] | None:
        """Label the best checkpoint on disk of the state's data, and return its step and loss; None if none was lost.

        Waits for the save of a better one in flight. On rank 0.
        """
        save = self._in_flight
        if save is not None and "best" in save.labels:
            self.settle()
        # `runs rm` may have deleted it, or a rewind set it aside.
        is_own = (state.best_step or 0) > self._branched_at
        is_gone = is_own and "best" not in catalog.read_labels(self.run_dir)
        if not self._has_lost_best and not is_gone:
            return None
        self._has_lost_best = False
        infos, since = catalog.list_checkpoints(self.run_dir)[0], state.best_from
        of_data = (info for info in infos if info.step > since and info.val_loss is not None)
        if (best := min(of_data, key=lambda one: one.val_loss or 0.0, default=None)) is None:
            return None, None
        self.label(best.step, ["best"])
        return best.step, best.val_loss

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
        save: _Save,
        content: store.Content,
        rng_states: list[dict[str, Any]],
        *,
        must_succeed: bool,
    ) -> str | None:
        """Write, label and report on rank 0, or leave that to a thread; return what went wrong, or None."""
        assert self.folder is not None
        state = save.state
        if (warning := self.folder.check_lock()) is not None:
            self.logger.warn(warning, state.step)
        if not content.is_finite:
            raise NonFiniteError(
                f"step {state.step}: the weights are not finite and were not saved; "
                f"resume from a checkpoint {LOWER_RATE}"
            )
        if (problem := self._make_room() or self.logger.flush()) is not None:
            self._has_lost_best |= "best" in save.labels
            return f"checkpoint of step {state.step} not saved: {problem}"
        error: OSError | None = None
        try:
            draft = self._draft(save, content, rng_states)
            if self._buffer is not None and not must_succeed and self._leave(save, draft):
                return None
            with self.signals.committing():
                manifest.commit(self.run_dir, draft)
        except OSError as caught:
            error = caught
        return self._conclude(save, error)

    def _conclude(self, save: _Save, error: OSError | None) -> str | None:
        """Label, report and retire after a commit, or after its error; return what went wrong, or None."""
        assert self.folder is not None
        state, labels = save.state, save.labels
        self._is_on_disk = error is None or (self.run_dir / folder_name(state.step)).exists()
        if not self._is_on_disk:
            self._has_lost_best |= "best" in labels
            return f"checkpoint of step {state.step} not saved: {error}"
        if error is not None:  # the commit itself succeeded
            self.logger.warn(
                f"checkpoint of step {state.step}: {error}; a power cut may lose it, so that older ones stay",
                state.step,
            )
        self.label(state.step, labels)
        faultpoint("checkpoint.after_label", state.step)
        seconds = (save.ended or time.monotonic()) - save.began
        stalled = min(save.stalled, seconds) if save.ended else seconds
        self._report(save, seconds, stalled)
        try:
            # After a second request to stop, the next start deletes old checkpoints.
            if error is None and self.signals.level < 2:
                self._retain(
                    self.settings.keep_checkpoints, self.settings.keep_emergency_checkpoints
                )
            self.folder.write_status("running", step=state.step)
        except (OSError, CheckpointError) as error:
            self.logger.warn(f"after the checkpoint of step {state.step}: {error}", state.step)
        return None

    def _retain(self, keep: int, keep_emergency: int) -> None:
        catalog.retain(
            self.run_dir, keep=keep, keep_emergency=keep_emergency, resumed_from=self.resumed_from
        )

    def _make_room(self) -> str | None:
        """Make room for a checkpoint by retiring old ones early; return what is missing, or None."""
        needed = _ROOM * store.staging_bytes(self.model, self.optimizers)
        if shutil.disk_usage(self.run_dir).free >= needed:
            return None
        with suppress(OSError, CheckpointError):  # the free space below shows what failed
            catalog.sweep(self.run_dir)
            self._retain(max(1, self.settings.keep_checkpoints - 1), 1)
        free = shutil.disk_usage(self.run_dir).free
        if free >= needed:
            return None
        return f"{fmt.num_bytes(free)} free on its disk, {fmt.num_bytes(needed)} needed"

    def _report(
        self, save: _Save, seconds: float | None = None, stalled: float | None = None
    ) -> None:
        """Write the event of a checkpoint, and show it unless an earlier start has, which measured its `seconds`."""
        step, labels = save.state.step, save.labels
        path = self.run_dir / folder_name(step)
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        self.logger.event(
            "checkpoint",
            step,
            path=str(path),
            kind=save.kind,
            labels=labels,
            bytes=num_bytes,
            seconds=seconds,
            stall_seconds=stalled,
        )
        if seconds is None or stalled is None:
            return
        named = f" ({', '.join(labels)})" if labels else ""
        waited = f", training waited {stalled:.1f} s" if stalled < seconds else ""
        self.logger.say(
            f"step {step} | saved {save.kind} checkpoint{named}: {path.name}, "
            f"{fmt.num_bytes(num_bytes)} in {seconds:.1f} s{waited}"
        )


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run GPU work in a separate stream, so that it does not wait for earlier work; wait for it at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
