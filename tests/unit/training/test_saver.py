"""How the trainer saves: a checkpoint that a thread writes has the same bytes; one buffer, one save in flight."""

import errno
import math
import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import gpt2lab.training.steps
from gpt2lab.checkpoint import store
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.errors import FolderLostError, SaveError
from gpt2lab.model.gpt import GPT
from gpt2lab.training.saver import Saver
from gpt2lab.training.steps import StepPipeline
from one_process import Operators
from plain_log import read_events
from whole_run import Run

SAVES = ("--checkpoint_freq=2", "--eval_freq=4", "--max_steps=8")


def test_a_buffer_that_cannot_be_pinned_leaves_no_error_for_the_next_kernel(monkeypatch):
    """In place of a card: the runtime keeps an error until a kernel's launch reports it. tests/gpu asks a real one."""
    errors: list[int] = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        errors.append(2)  # out of memory
        return errors[-1]

    def launch_kernel(*size: object, device: str) -> None:
        if errors:
            raise RuntimeError(f"CUDA error {errors.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "ones", launch_kernel)
    buffer = store.StagingBuffer(64, pin=True)
    assert not buffer._is_pinned
    assert errors == []
    buffer.close()


@pytest.fixture(scope="module")
def both(tiny_data, tmp_path_factory) -> dict[str, Run]:
    """Return the same run with and without the thread; `places` are the buffer's at each save by it."""
    runs = {}
    for mode in ("off", "on"):
        run = runs[mode] = Run(tiny_data, tmp_path_factory.mktemp(mode), *SAVES)
        places: list[tuple[int, int]] = []
        real = Saver._leave

        def leave(self: Saver, *more: Any, places=places, real=real) -> bool:
            places.append((self._buffer.address, self._buffer.num_bytes))
            return real(self, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Saver, "_leave", leave)
            run.train(f"--async_checkpoint={mode}")
        run.places = places
    return runs


def test_one_buffer_of_the_size_of_a_checkpoint_serves_all_saves(both):
    assert both["off"].places == []
    assert len(both["on"].places) == 3, "training waits for the last"
    [(_, size)] = set(both["on"].places)
    values, tensors = 34_176, 28 * 3 + 28  # weights and two moments; step counts of 4 bytes
    assert 0 <= size - 12 * values <= 64 * tensors


def test_a_checkpoint_is_recorded_after_its_step_with_what_training_waited(both):
    for mode, run in both.items():
        order = [(event["event"], event["step"]) for event in read_events(run.path)]
        saves = run.events("checkpoint")
        assert [event["step"] for event in saves] == [2, 4, 6, 8]
        for event in saves:
            assert order.index(("checkpoint", event["step"])) > order.index(("step", event["step"]))
            assert 0 < event["stall_seconds"] <= event["seconds"]
            assert mode == "on" or event["stall_seconds"] == event["seconds"]


def test_no_memory_for_a_buffer_means_saves_while_training_waits(run, monkeypatch):
    no_memory = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    full = SimpleNamespace(mmap=Mock(side_effect=no_memory), MAP_PRIVATE=0, MAP_ANONYMOUS=0)
    monkeypatch.setattr(store, "mmap", full)
    run.train("--async_checkpoint=on", "--max_steps=2", "--eval_freq=0", "--checkpoint_freq=1")
    assert list(run.checkpoints()) == [1, 2]
    told = [event["message"] for event in run.events("warning") if "asynch" in event["message"]]
    (told,) = told
    assert told == "no asynchronous checkpoints, training waits: [Errno 12] Cannot allocate memory"


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_best_is_the_best_on_disk(mode, run, monkeypatch):
    """Where the save of a better one fails, later losses are compared with those that are there."""
    plain, losses = TrainState.with_val_loss, {0: 9.0, 2: 0.5, 4: 0.3, 6: 0.4, 8: 0.45}
    monkeypatch.setattr(TrainState, "with_val_loss", lambda self, _: plain(self, losses[self.step]))
    monkeypatch.setenv("FAULT", "checkpoint.before_rename:enospc@4")
    run.train(f"--async_checkpoint={mode}", "--eval_freq=2", "--checkpoint_freq=0", "--max_steps=8")
    saved = {event["step"]: event["labels"] for event in run.events("checkpoint")}
    assert saved == {2: ["best"], 6: ["best"], 8: []}
    # After a change of the validation data the best on disk is of other windows.
    losses.update({10: 5.0, 12: 6.0, 14: 7.0, 16: 8.0})
    monkeypatch.setenv("FAULT", "checkpoint.before_rename:enospc@10")
    run.train("--resume=latest", "--val_tokens=64", "--max_steps=12", "--allow_change=max_steps")
    assert run.events("checkpoint")[-1]["labels"] == ["best"]
    run.train("--resume=latest", "--max_steps=14", "--allow_change=max_steps")
    shutil.rmtree(run.path / run.labels()["best"])  # as `runs rm` does
    (run.path / "labels" / "best").unlink()
    run.train("--resume=latest", "--max_steps=16", "--allow_change=max_steps")
    assert run.labels()["best"] == "step_00000014"


@pytest.mark.parametrize("lasts", [False, True])
def test_a_stop_at_the_step_in_flight_saves_it_again_if_that_fails(lasts, run, monkeypatch):
    """Only if the trainer's own attempt fails too, the run could not save."""
    real = Saver._leave
    monkeypatch.setenv("FAULT", "checkpoint.before_rename:enospc@2")

    def leave_and_stop(self: Saver, *args: Any) -> bool:
        left = real(self, *args)
        args[0].thread.join()
        if not lasts:
            monkeypatch.delenv("FAULT")
        os.kill(os.getpid(), signal.SIGTERM)
        while self.signals.level == 0:
            time.sleep(0.001)
        return left

    monkeypatch.setattr(Saver, "_leave", leave_and_stop)
    flags = ("--async_checkpoint=on", "--eval_freq=0", "--checkpoint_freq=2", "--max_steps=6")
    if lasts:
        with pytest.raises(SaveError, match="checkpoint of step 2 not saved"):
            run.train(*flags)
        assert run.status()["exit_code"] == 75
        assert not run.checkpoints()
        return
    run.train(*flags)
    assert [(e["step"], e["kind"]) for e in run.events("checkpoint")] == [(2, "emergency")]
    assert (run.status()["state"], run.status()["step"]) == ("stopped", 2)


def test_a_rescue_has_room_where_the_first_save_had_no_moments(run, monkeypatch):
    """As after updates that were all rejected: the buffer then holds weights alone."""
    plain, factor = GPT.forward, [math.nan]

    def act(name: str, step: int) -> None:
        factor[0] = math.nan if step <= 2 else 1.0
        if (name, step) == ("step", 4):
            raise RuntimeError("a GPU fell off the bus")

    monkeypatch.setattr(GPT, "forward", lambda self, *a: plain(self, *a) * factor[0])
    monkeypatch.setattr(gpt2lab.training.steps, "faultpoint", act)
    with pytest.raises(RuntimeError, match="fell off"):
        run.train("--async_checkpoint=on", "--eval_freq=0", "--checkpoint_freq=2", "--max_steps=6")
    assert list(run.checkpoints()) == [2, 3]


def test_a_rescue_launches_copies_alone():
    """A kernel that was never launched may wait for ever to be loaded, beside a collective that hangs."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    buffer = store.StagingBuffer(store.staging_bytes(model, [optimizer]), pin=False)
    with Operators() as ran:
        content = store.collect(model, [optimizer], keep=True, into=buffer, only_copies=True)
    kinds = {name.removeprefix("aten::").partition(".")[0] for name in ran.names}
    assert kinds == {"copy_", "detach", "slice", "view"}
    assert store.all_finite(*content.model.values())
    content.model["bias"][3] = math.inf
    assert not store.all_finite(*content.model.values())
    del content
    buffer.close()


def test_nothing_is_committed_in_a_folder_that_another_start_has_taken(run, monkeypatch):
    """Where that happens while a save is in flight."""

    def act(name: str, step: int) -> None:
        if (name, step) == ("step", 3):
            (run.path / "new.lock").touch()
            os.replace(run.path / "new.lock", run.path / "run.lock")

    monkeypatch.setattr(gpt2lab.training.steps, "faultpoint", act)
    monkeypatch.setenv("FAULT", "checkpoint.before_rename:sleep1.5@2")
    flags = ("--async_checkpoint=on", "--eval_freq=0", "--checkpoint_freq=2", "--max_steps=6")
    assert isinstance(run.rejected(*flags), FolderLostError)
    [writer] = [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]
    writer.join(60)
    assert not list(run.path.glob("*step_*"))
    assert not list(run.path.glob(".tmp-*"))


def test_a_stop_allows_for_a_save_in_flight_and_its_own(run, monkeypatch):
    """From the end of the first save on, and from the first step of a resume; a slow last save is no hang."""
    margins, limits, saves, plain = {}, {}, {}, StepPipeline.finish

    def finish(self: StepPipeline) -> bool:
        while self.saver.is_writing():
            time.sleep(0.01)
        continues = plain(self)
        margins[self.state.step] = self.control.margin_seconds
        saves[self.state.step] = self.saver.stop_seconds
        limits[self.state.step] = self.control._heartbeat.limit_seconds("saving")
        return continues

    monkeypatch.setattr(StepPipeline, "finish", finish)
    monkeypatch.setenv("FAULT", "checkpoint.before_rename:sleep0.9@2")
    flags = ("--async_checkpoint=on", "--eval_freq=0", "--checkpoint_freq=2", "--max_steps=7")
    run.train(*flags, "--hang_seconds=0", "--stop_after_steps=6")
    run.train(*flags, "--resume=latest")
    first, second, third, _ = (event["seconds"] for event in run.events("checkpoint"))
    assert margins[4] >= 1.5 * 2 * first
    assert margins[7] >= 1.5 * 2 * third
    assert (saves[6], saves[7]) == pytest.approx((2 * max(first, second), 2 * third))
    assert limits[5] >= 10 * first, "not ten times what training waited"


def test_early_stopping_counts_losses_in_a_row_and_not_steps(run, monkeypatch):
    """A resume may evaluate more often than the start before."""
    plain, losses = TrainState.with_val_loss, {6: 3.0, 8: 4.0, 9: 2.0}
    monkeypatch.setattr(
        TrainState, "with_val_loss", lambda self, _: plain(self, losses.get(self.step, 5.0))
    )
    run.train("--max_steps=20", "--eval_freq=6", "--stop_after_steps=8")
    more = ("--eval_freq=1", "--early_stopping_patience=2", "--max_steps=20")
    run.train("--resume=latest", *more)
    assert (run.status()["reason"], run.status()["step"]) == ("early stopping", 11)
