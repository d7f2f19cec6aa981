"""Steps launched before the loss of the one before is read: the same run, no wait, and a rescue that knows its step.

A CPU computes at once, so the order of a GPU runs here with every step complete when it is launched; a device that
hangs is one whose marks do not pass.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpt2lab.training.control
import launch
from gpt2lab.config.schema import Config, LogConfig, OptimConfig, SystemConfig
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import DeviceMark, Numbers, Strategy
from gpt2lab.errors import GPT2LabError, NonFiniteError
from gpt2lab.optim.optimizers import AdamW, build_optimizers, reject_on_device
from gpt2lab.training.health import why_host_decides
from gpt2lab.training.saver import Saver
from gpt2lab.training.trainer import Trainer
from plain_log import read_events
from whole_run import Run

TIMES = {
    *("time", "seconds", "step_seconds", "tokens_per_second", "data_wait_seconds", "cpu_seconds"),
    *("stall_seconds", "peak_memory_bytes", "elapsed_seconds", "remaining_seconds", "created"),
    *("path", "on_track", "checkpoint", "bytes"),
}


class Both:
    """A run whose steps follow one by one, and the same pipelined."""

    def __init__(self, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = [Run(data, folder / name) for name in ("one_by_one", "pipelined")]
        self._patch = monkeypatch

    def train(self, *more: str, prepare: Callable[[Run], None] = lambda run: None) -> None:
        for run in self.runs:
            self._patch.setattr(Runtime, "runs_ahead", run is self.runs[1], raising=False)
            prepare(run)
            try:
                run.train(*more)
            except GPT2LabError as error:
                error.with_traceback(None)  # its frames would keep the run locked
                assert isinstance(error, NonFiniteError)

    def assert_equal(self) -> None:
        """Compare logs, checkpoints, labels and status, all but what a clock says and the order's own line."""
        one, other = (_facts(run) for run in self.runs)
        for event, same in zip(one["events"], other["events"], strict=True):
            assert event == same
        assert one == other
        assert one["checkpoints"]


def _facts(run: Run) -> dict[str, Any]:
    logged = launch.all_events(run.path)
    events = [{k: value for k, value in event.items() if k not in TIMES} for event in logged]
    states = {}
    for step, info in run.checkpoints().items():
        content = json.loads((info.path / "state.json").read_text())
        del content["state"]["train_seconds"]
        files = info.manifest["files"]
        hashes = [files[name]["sha256"] for name in ("model.safetensors", "optim.safetensors")]
        states[step] = (content, info.kind, hashes)
    status = {key: run.status()[key] for key in ("state", "step", "exit_code")}
    return {"events": events, "checkpoints": states, "labels": run.labels(), "status": status}


@pytest.fixture
def both(tiny_data, tmp_path, monkeypatch) -> Both:
    monkeypatch.setattr(gpt2lab.training.control, "_LOOK_EVERY", 0.0)
    return Both(tiny_data, tmp_path, monkeypatch)


@pytest.mark.parametrize(("dtype", "factor"), [("fp32", math.nan), *launch.slow(("fp16", 1e30))])
def test_log_and_checkpoints_are_those_of_steps_one_by_one(both, spoil, dtype, factor):
    """Over an end of epoch, evaluations, saves, a stop and a resume, and gradients that are not finite.

    NorMuon trains the blocks' matrices, AdamW the rest. In fp16 each such gradient halves the loss scale.
    """
    spoil(1, 6, 10, 11, 17, factor=factor)
    flags = ("--max_steps=26", "--eval_freq=8", "--checkpoint_freq=5", "--epoch_checkpoints=on")
    flags = (*flags, "--optimizer=normuon", f"--dtype={dtype}")
    both.train(*flags, "--stop_after_steps=13")
    both.train(*flags, "--resume=latest")
    both.assert_equal()
    pipelined = both.runs[1]
    skipped = [e["step"] for e in pipelined.events("step") if not e["updated"]]
    assert skipped == [1, 6, 10, 11, 17]
    scale = [2.0**11, 9.0] if dtype == "fp16" else None
    assert pipelined.saved_state(26)["loss_scale"] == scale
    assert "steps          pipelined" in (pipelined.path / "log.txt").read_text()


def test_four_bad_updates_in_a_row_end_it_at_the_same_step(both, on_steps, spoil):
    bad, launched = spoil(3, 5, 6, 7, 8), []
    on_steps(lambda number: (launched.append(number), bad(number))[1])
    both.train("--max_steps=20", "--eval_freq=0", "--checkpoint_freq=3")
    both.assert_equal()
    assert both.runs[1].status()["exit_code"] == 76
    assert launched == [*range(1, 9)] * 2, "nothing is launched after the fourth"


@pytest.mark.usefixtures("counts_signals")
def test_requests_save_and_stop_at_the_same_step(both, on_steps):
    def prepare(run: Run) -> None:
        def act(number: int) -> None:
            if number in (4, 12):
                (run.path / ("SAVE" if number == 4 else "STOP")).touch()
            if number == 7:
                signal.raise_signal(signal.SIGTERM)

        on_steps(act)

    flags = ("--max_steps=20", "--eval_freq=0", "--checkpoint_freq=0")
    both.train(*flags, prepare=prepare)
    both.train(*flags, "--resume=latest", prepare=prepare)
    both.assert_equal()
    run = both.runs[1]
    assert list(run.checkpoints()) == [4, 7, 12]
    assert [e["reason"] for e in run.events("stop")] == ["SIGTERM", "STOP file"]


@pytest.mark.usefixtures("counts_signals")
def test_pipelined_steps_change_only_when_a_save_ends(both, on_steps, monkeypatch):
    """As on a GPU, over a stop while a save is in flight, and a resume; against saves while training waits."""
    leave, written = Saver._leave, []
    monkeypatch.setattr(Saver, "_leave", lambda *a: (written.append(a[2].step), leave(*a))[1])
    for run, mode in zip(both.runs, ("off", "on"), strict=True):
        run.flags.append(f"--async_checkpoint={mode}")

    def prepare(run: Run) -> None:
        if run is both.runs[1]:  # the save of step 9 takes some steps
            monkeypatch.setenv("FAULT", "checkpoint.before_rename:sleep0.3@9")

        def act(number: int) -> None:
            if number == 5:
                (run.path / "SAVE").touch()
            if number == 10:
                signal.raise_signal(signal.SIGTERM)

        on_steps(act)

    flags = ("--max_steps=16", "--eval_freq=6", "--checkpoint_freq=3", "--keep_checkpoints=9")
    both.train(*flags, prepare=prepare)
    both.train(*flags, "--resume=latest", prepare=prepare)
    one, other = (_facts(run) for run in both.runs)
    for facts in (one, other):  # the log tells of a save when it has ended
        facts["events"].sort(key=lambda event: event["event"] == "checkpoint")
    assert (one, list(one["checkpoints"])) == (other, [3, 5, 6, 9, 10, 12, 15, 16])
    assert written == [3, 5, 6, 9, 12, 15], "training waits for those of a stop and of the end"
    order = [(event["event"], event["step"]) for event in read_events(both.runs[1].path)]
    assert order.index(("checkpoint", 9)) > order.index(("step", 10)), "it was in flight"
    for step in one["checkpoints"]:
        assert order.index(("checkpoint", step)) > order.index(("step", step))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "dtype", "factor"),
    [*((mode, "fp32", "nan") for mode in ("ddp", "zero1", "fsdp")), ("fsdp", "fp16", "1e30")],
)
def test_two_ranks_decide_alike(both, parallel, dtype, factor):
    """Also where one of them alone has a gradient that is not finite."""
    for run, pipelined in zip(both.runs, "01", strict=True):
        flags = [*run.flags, "--max_steps=12", "--eval_freq=5", "--drift_check_freq=4", "--verbose"]
        flags += [f"--parallel={parallel}", f"--dtype={dtype}"]
        flags += ["--optimizer=normuon"]  # and AdamW of what it leaves
        which = {"PIPELINED": pipelined, "BAD_RANK": "1", "BAD_FACTOR": factor}
        program = launch.WORKERS / "pipelined.py"
        done = launch.worked(launch.train_in_forks(flags, world=2, program=program, **which))
        assert ("steps          pipelined" in done.stdout) == (pipelined == "1")
    both.assert_equal()
    assert [e["step"] for e in both.runs[1].events("step") if not e["updated"]] == [7]


class Reads(TorchDispatchMode):
    """Notes the numbers that python asks tensors for: each waits for a GPU's queue, up to where it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.order.append(result)
        return result


def test_a_loss_is_read_after_the_next_step_is_launched(tiny_data, tmp_path, on_steps, monkeypatch):
    monkeypatch.setattr(Runtime, "runs_ahead", True, raising=False)
    reads, run = Reads(), Run(tiny_data, tmp_path)
    on_steps(lambda number: reads.order.append(f"launch {number}"))
    last, due = 12, {1, 6, 12}  # the first compiles; 6 and 12 are saved
    with reads:
        run.train(f"--max_steps={last}", "--eval_freq=0", "--checkpoint_freq=6")
    begin = reads.order.index("launch 1")
    kinds = ("loss", "grad_norm")
    numbers = {event[key]: event["step"] for event in run.events("step") for key in kinds}
    names = [numbers.get(entry, entry) for entry in reads.order[begin:]]
    seen = [name for name in names if type(name) in (int, str)]
    expected: list[Any] = []
    for step in range(1, last + 1):
        expected.append(f"launch {step}")
        read = [step - 1] * (step - 1 not in {0, *due}) + [step] * (step in due)
        expected += [number for number in read for _ in ("loss", "norm")]
    assert seen[: len(expected)] == expected
    between = names[names.index("launch 7") : names.index("launch 12")]
    assert between == seen[seen.index("launch 7") : seen.index("launch 12")], "and no other number"


def test_an_update_rejected_by_the_optimizer_changes_nothing_and_counts_no_step():
    parameter = torch.nn.Parameter(torch.ones(5))
    module = torch.nn.ParameterList([parameter])
    [optimizer] = build_optimizers(module, OptimConfig())
    finite, bad = torch.tensor(1.0), torch.tensor(math.nan)
    for numbers, steps in [((finite, finite), 1), ((finite, bad), 1), ((bad, finite), 1)]:
        before = parameter.detach().clone()
        parameter.grad = torch.full((5,), float(sum(numbers)))
        reject_on_device([optimizer], numbers)
        optimizer.step()
        assert optimizer.state[parameter]["step"] == steps
        assert torch.equal(parameter, before) == (numbers != (finite, finite))
    assert all(torch.isfinite(value).all() for value in optimizer.state[parameter].values())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Config(), None),
        (Config(optim=OptimConfig(on_spike="skip")), "on_spike skip"),
        (Config(system=SystemConfig(reduce="exact")), "reduce exact"),
        (Config(system=SystemConfig(fsdp_offload=True)), "fsdp_offload"),
        (Config(log=LogConfig(histogram_freq=5)), "histograms of gradients"),
    ],
)
def test_the_host_decides_where_the_device_cannot(config, reason, monkeypatch):
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Module()])})
    model["blocks"][0].c_fc = torch.nn.Linear(2, 2)  # type: ignore[index]
    optimizers = build_optimizers(model, config.optim)
    assert why_host_decides(config, optimizers, Runtime()) == "the device computes at once"
    monkeypatch.setattr(Runtime, "runs_ahead", True)
    assert why_host_decides(config, optimizers, Runtime()) == reason
    # So it does where an optimizer cannot reject.
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert why_host_decides(Config(), [AdamW(parameters)], Runtime()) is None
    unable, reason = torch.optim.SGD(parameters), "SGD cannot reject updates on the device"
    assert why_host_decides(Config(), [unable], Runtime()) == reason


class Never(DeviceMark):
    """A mark that a device which hangs before it does not pass."""

    def has_passed(self) -> bool:
        return False

    def wait(self) -> None:
        """Do what the thread of the heartbeat does when this one waits for too long."""
        rescuer = threading.Thread(target=Trainer.newest.saves.rescue)
        rescuer.start()
        rescuer.join()
        raise RuntimeError("waited for a device that hangs")


@pytest.fixture(scope="module")
def one_by_one(tiny_run) -> Run:
    return tiny_run(max_steps=8, eval_freq=0, checkpoint_freq=1, keep_checkpoints=9)


@pytest.mark.parametrize(
    ("hangs", "error_at", "saved", "logged"),
    [
        ("nowhere", 6, 5, 5),  # step 5 is complete, and nobody has read it
        ("before the numbers", 6, 4, 4),  # in the all-reduce of step 5: weights are those of step 4
        ("before the numbers", None, 4, 4),  # another thread saves while this one waits for step 5
        ("within the update", 6, None, 4),
    ],
)
def test_a_rescue_while_a_step_is_in_flight_saves_what_it_can_prove(
    hangs, error_at, saved, logged, one_by_one, tiny_data, tmp_path, on_steps, monkeypatch
):
    now, hung = [0], threading.Event()
    plain_update, plain_send, plain_fit = AdamW.step, Strategy.send_to_host, Trainer.fit

    def update(self: Any, closure: Any = None) -> Any:
        return None if hung.is_set() else plain_update(self)

    def send(self: Strategy, *values: torch.Tensor) -> Numbers:
        if (now[0], hangs) == (5, "before the numbers"):
            hung.set()
        numbers = plain_send(self, *values)
        if (now[0], hangs) == (5, "within the update"):
            hung.set()
        return numbers

    def act(number: int) -> None:
        now[0] = number
        if number == error_at:
            raise RuntimeError("connection closed by peer")

    def mark(self: Strategy) -> DeviceMark:
        return (Never if hung.is_set() else DeviceMark)(time.monotonic(), None)

    def fit(self: Trainer) -> str | None:
        Trainer.newest = self
        return plain_fit(self)

    monkeypatch.setattr(Strategy, "mark", mark)
    monkeypatch.setattr(Strategy, "send_to_host", send)
    monkeypatch.setattr(AdamW, "step", update)
    monkeypatch.setattr(Trainer, "newest", None, raising=False)
    monkeypatch.setattr(Trainer, "fit", fit)
    monkeypatch.setattr(Runtime, "runs_ahead", True)
    on_steps(act)
    run = Run(tiny_data, tmp_path)
    with pytest.raises(RuntimeError, match="by peer" if error_at else "waited for a device"):
        run.train("--max_steps=8", "--eval_freq=0", "--checkpoint_freq=0")
    assert list(run.losses()) == list(range(1, logged + 1))
    assert list(run.checkpoints()) == ([] if saved is None else [saved])
    if saved is None:
        return
    expected, found = one_by_one.checkpoints()[saved], run.checkpoints()[saved]
    for name in ("model.safetensors", "optim.safetensors"):
        assert found.manifest["files"][name] == expected.manifest["files"][name]
    order = [(event["event"], event["step"]) for event in read_events(run.path)]
    assert order.index(("step", saved)) < order.index(("checkpoint", saved))
