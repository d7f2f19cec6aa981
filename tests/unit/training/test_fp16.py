"""fp16: losses within noise of fp32, an overflow skips one update and halves the scale, a kill changes no bit."""

import math

import pytest
import torch
from torch._dynamo.utils import counters

import launch
from gpt2lab.checkpoint.store import OVERFLOW
from gpt2lab.config.schema import SystemConfig
from gpt2lab.distributed.processor import FP16_ON_CPU
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import NonFiniteError
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.optimizers import LossScale
from whole_run import Run

RUN = ("--dtype=fp16", "--eval_freq=0", "--keep_checkpoints=9")


def overflowing(run: Run, *more: str, world: int = 1, **extra: str) -> int:
    """Train with a loss that is 1e30 times too large on rank 0 in step 7, and return the exit code."""
    extra |= {"PIPELINED": "0", "BAD_RANK": "0", "BAD_FACTOR": "1e30"}
    program, flags = launch.WORKERS / "pipelined.py", [*run.flags, *more]
    return launch.train_in_forks(flags, world=world, program=program, **extra).returncode


@pytest.mark.slow
def test_200_losses_are_those_of_fp32_up_to_noise(run, tiny_data, tmp_path):
    other = Run(tiny_data, tmp_path, "--eval_freq=0", name="fp32")
    for each in (run, other):
        each.train("--max_steps=200", "--max_lr=0.003")
    found, expected = run.losses(), other.losses()
    assert expected[200] < expected[1] - 0.5, "it learns"
    assert max(abs(found[n] - expected[n]) for n in range(1, 201)) < 1e-3
    assert {event["loss_scale"] for event in run.steps().values()} == {2.0**16}
    assert run.saved_state(200)["loss_scale"] == [2.0**16, 200]
    assert "loss_scale" not in other.steps()[200]
    slow = [[e["message"] for e in each.events("warning")] for each in (run, other)]
    assert [FP16_ON_CPU in warnings for warnings in slow] == [True, False]
    assert other.saved_state(200)["loss_scale"] is None


def test_the_scale_follows_torchs_own_scaler():
    ours, theirs = LossScale(torch.device("cpu")), torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(weight.sum())
    for step in range(4600):
        norm = torch.tensor(float("inf") if step in (3, 4, 2500) else 1.0)
        weight.grad = norm[None] * theirs.get_scale()
        theirs.step(optimizer)
        theirs.update()
        found = ours.update(norm)
        assert found[0].item() == theirs.get_scale(), step
        if step % 1000 == 0:  # as after a resume
            ours.restore(tuple(number.item() for number in found))
    assert ours.scale.item() == 2.0**15


def test_more_ranks_need_no_wider_range(monkeypatch):
    runtime, linear = Runtime(timeout_minutes=1), torch.nn.Linear(1, 1, bias=False)
    for ranks in (1, 4):
        monkeypatch.setattr(runtime, "world_size", ranks)
        strategy = Strategy(runtime, SystemConfig(dtype="fp16"))
        assert strategy.loss_factor(8) == 2.0**13
        linear.weight.grad = torch.full((1, 1), 2.0**13 / ranks)  # averaged over them
        assert strategy.clip_grad_norm(linear, math.inf) == linear.weight.grad == 1 / 8
    runtime.close()


@pytest.mark.parametrize("more", [(), ("--on_spike=skip",)])
def test_an_overflow_skips_one_update_and_halves_the_scale(more, run):
    assert overflowing(run, "--max_steps=9", "--checkpoint_freq=1", *more) == 0
    assert run.hashes(6) == run.hashes(7)
    events = run.steps()
    assert [n for n, event in events.items() if not event["updated"]] == [7]
    assert (events[7]["grad_norm"], events[7]["loss"] > 1e30) == (None, True)
    assert [events[n]["loss_scale"] for n in (6, 7, 9)] == [2.0**16, 2.0**15, 2.0**15]
    state = run.saved_state(9)
    assert state["skipped"] == [{"step": 7, "reason": OVERFLOW, "samples": [48, 56]}]
    assert state["loss_scale"] == [2.0**15, 2]
    said = "the update was skipped, the loss scale is now 32768"
    assert said in (run.path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("world", "more"),
    [
        *((1, ()), *launch.slow((2, ()), (2, ("--parallel=zero1",)))),
        *launch.slow((2, ("--parallel=fsdp", "--optimizer=muon"))),
    ],
)
def test_a_kill_after_an_overflow_changes_no_bit(world, more, run, tiny_data, tmp_path):
    whole = Run(tiny_data, tmp_path, *run.flags[-3:], name="whole")
    flags = ("--max_steps=14", "--checkpoint_freq=3", *more)
    assert overflowing(whole, *flags, world=world) == 0
    assert overflowing(run, *flags, world=world, FAULT="step:kill9@12") != 0
    assert (max(run.checkpoints()), overflowing(run, "--resume=latest", world=world)) == (9, 0)
    assert run.bits() == whole.bits()
    assert run.saved_state(14)["loss_scale"] == whole.saved_state(14)["loss_scale"] == [2.0**15, 7]


def test_gradients_that_no_scale_holds_end_the_run(run, monkeypatch):
    plain = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, *inputs: plain(self, *inputs) * 1e30)
    rejection = run.rejected("--max_steps=25", "--checkpoint_freq=0", kind=NonFiniteError)
    assert "step 21: 4 updates in a row were not finite" in str(rejection)
    assert run.steps()[17]["loss_scale"] == 0.5


@pytest.mark.slow
def test_one_compiled_graph_serves_every_scale(run, tiny_data, tmp_path, monkeypatch):
    plain = Run(tiny_data, tmp_path, *run.flags[-3:], name="plain")
    update, graphs = LossScale.update, []

    def overflow_in_2_and_4(self: LossScale, norm: torch.Tensor) -> object:
        graphs.append(counters["stats"]["unique_graphs"])
        return update(self, norm * (float("inf") if len(graphs) in (2, 4) else 1.0))

    plain.train("--max_steps=6")
    monkeypatch.setattr(LossScale, "update", overflow_in_2_and_4)
    run.train("--max_steps=6", "--compile=on")
    powers = [math.log2(event["loss_scale"]) for event in run.steps().values()]
    assert (powers, len(set(graphs))) == ([16, 15, 15, 14, 14, 14], 1)
    assert run.losses() == pytest.approx(plain.losses(), abs=1e-3)
