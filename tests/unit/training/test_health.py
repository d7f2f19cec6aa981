"""Bad gradients never reach the weights, spikes are found in their own spread, drift is named."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import launch
from gpt2lab.checkpoint import store as state_module
from gpt2lab.checkpoint.store import NOT_FINITE, TrainState
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import CheckpointError, DriftError, NonFiniteError
from gpt2lab.files import JsonFile
from gpt2lab.training import health
from tiny import resolved, write_shards
from whole_run import Run, S

RUN = ("--checkpoint_freq=1", "--eval_freq=0", "--keep_checkpoints=99")


@pytest.fixture
def soon(monkeypatch) -> None:
    """Judge by few losses, so that a short run has health."""
    monkeypatch.setattr(health, "FEWEST_LOSSES", 4)
    monkeypatch.setattr(state_module, "WINDOW", 8)
    monkeypatch.setattr(health, "REWIND_STEPS", 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_changes_nothing_and_the_run_goes_on(bad, run, spoil):
    spoil(5, factor=bad)
    run.train("--max_steps=8")
    assert run.hashes(5) == run.hashes(4) != run.hashes(6)
    event = run.events("step")[4]
    assert (event["loss"], event["updated"]) == (None, False)
    assert [e["updated"] for e in run.events("step")].count(False) == 1
    [warning] = [e for e in run.events("warning") if "skipped" in e["message"]]
    assert ("step 5" in warning["message"], "samples 32 on" in warning["message"]) == (True, True)
    state = run.saved_state(8)
    assert state["skipped"] == [{"step": 5, "reason": NOT_FINITE, "samples": [32, 40]}]
    assert state["non_finite_in_a_row"] == 0
    assert math.isfinite(run.losses()[8])


def test_four_in_a_row_end_the_run_with_a_finite_newest_checkpoint(run, spoil):
    spoil(2, 4, 5, 6, 7)
    assert "4 updates in a row" in str(run.rejected("--max_steps=20", kind=NonFiniteError))
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 76)
    newest = max(run.checkpoints())
    assert run.hashes(newest) == run.hashes(3)
    assert run.status()["checkpoint"].endswith(f"step_{newest:08d}")


def test_the_row_of_bad_gradients_is_counted_across_a_resume(run, spoil):
    spoil(1, 4, 5, 6, 7)
    run.train("--max_steps=20", "--stop_after_steps=1")
    run.train("--max_steps=20", "--stop_after_steps=5", "--resume=latest")
    updated = [event["updated"] for event in run.events("step")]
    assert updated == [False, True, True, False, False]
    assert "step 7: 4 updates in a row" in str(run.rejected("--max_steps=20", "--resume=latest"))


@pytest.mark.parametrize(("freq", "fault"), [(1, ""), (0, "step:raise@2")])
def test_weights_that_are_not_finite_are_never_saved(freq, fault, run, monkeypatch):
    """The gradient was finite, the step it led to was not; after an error of another kind nobody rescues them."""
    monkeypatch.setenv("FAULT", fault)
    flags = ("--max_steps=4", "--max_lr=3e38", "--min_lr=0", "--warmup_steps=0")
    with pytest.raises(RuntimeError if fault else NonFiniteError):
        run.train(*flags, f"--checkpoint_freq={freq}")
    files = [info.path / "model.safetensors" for info in run.checkpoints().values()]
    tensors = [one for file in files for one in safetensors.torch.load_file(file).values()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("more", [(), ("--on_spike=skip",)])
def test_a_spike_is_told_and_can_be_skipped(more, run, spoil):
    spoil(12, factor=50.0)
    run.train("--max_steps=14", *more)
    [warning] = [e for e in run.events("warning") if "spike" in e["message"]]
    assert "step 12" in warning["message"]
    assert run.events("step")[11]["updated"] == (not more)
    assert (run.hashes(12) == run.hashes(11)) == bool(more)
    skipped = [{"step": 12, "reason": "spike", "samples": [88, 96]}] if more else []
    assert run.saved_state(14)["skipped"] == skipped


@pytest.mark.usefixtures("soon")
def test_a_rewind_leaves_the_data_out_and_is_repeated_and_resumed(run, spoil, tiny_data, tmp_path):
    spoil(12, factor=50.0)
    flags = ("--max_steps=24", "--on_spike=rewind")
    run.train(*flags)
    [event] = run.events("rewind")
    assert (event["step"], event["spike_step"], event["samples"]) == (9, 12, [72, 96])
    assert "epoch 1 of 1.14 |" in (run.path / "log.txt").read_text()
    state = run.saved_state(24)
    assert state["samples"] == 24 * S + 24
    seconds = [event["step_seconds"] for event in run.events("step")]
    assert state["train_seconds"] == pytest.approx(sum(seconds)), "also of what was given up"
    again = resolved([*run.flags, *flags, "--resume=latest"])
    assert again.end_sample == 24 * S + 24
    assert state["skipped"] == [{"step": 12, "reason": "rewind", "samples": [72, 96]}]
    assert len(list(run.path.glob("superseded-*/step_*"))) == 2
    straight = Run(tiny_data, tmp_path / "plain", "--eval_freq=0")
    straight.train("--max_steps=24")
    plain = {e["step"]: e["batch_hash"] for e in straight.events("step")}
    ours = [e["batch_hash"] for e in run.events("step")]
    assert ours[:11] == [plain[n] for n in range(1, 12)], "up to the spike, whose step left no line"
    assert ours[11:15] == [plain[n] for n in range(13, 17)], "from step 9 on with what follows it"
    cut = Run(tiny_data, tmp_path / "cut", *run.flags[-3:])
    cut.train(*flags, "--stop_after_steps=11")
    cut.train(*flags, "--resume=latest", "--stop_after_steps=13")
    cut.train(*flags, "--resume=latest")
    assert cut.hashes(24) == run.hashes(24)


@pytest.mark.usefixtures("soon")
def test_a_second_rewind_to_before_the_first_remembers_it_unless_it_is_one_too_many(
    run, spoil, tiny_data, tmp_path, monkeypatch
):
    spoil(12, 14, factor=50.0)
    flags = ("--max_steps=12", "--on_spike=rewind")
    run.train(*flags)
    monkeypatch.setattr(health, "MOST_REWINDS", 1)
    Run(tiny_data, tmp_path / "ends", *RUN).rejected(*flags, kind=NonFiniteError)
    skipped = [(r["step"], r["samples"]) for r in run.saved_state(12)["skipped"]]
    assert skipped == [(12, [72, 96]), (11, [64, 112])]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("change", ["optimizer", *launch.slow("data")])
def test_a_rewind_goes_back_to_no_other_optimizer_or_data(run, spoil, tmp_path, change):
    data = write_shards(tmp_path / "other", train=(900, 1200), val=(650,))
    values = [f"--data_dir={data}"] if change == "data" else ["--optimizer=muon", "--max_lr=1e-3"]
    flags = ("--max_steps=16", "--on_spike=rewind")
    run.train(*flags, "--stop_after_steps=10")
    first = 0 if change == "data" else 10
    spoil(first + 2, factor=50.0)
    run.train(*flags, *values, f"--allow_change={change},max_lr", "--resume=latest")
    [event] = run.events("rewind")
    assert (event["step"], event["samples"]) == (11, [S * (first + 1), S * (first + 2)])
    assert [turn["step"] for turn in run.saved_state(16)["history"]] == [10]


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_a_kill_after_a_rewind_says_that_the_change_before_it_must_be_given_again(
    run, spoil, tiny_data, tmp_path, monkeypatch
):
    spoil(12, factor=50.0)
    flags = ("--max_steps=13", "--on_spike=rewind", "--eval_freq=1")
    change = ("--resume=latest", "--max_lr=1e-3", "--allow_change=max_lr")
    whole = Run(tiny_data, tmp_path / "whole", *RUN)
    for one in (whole, run):
        one.train(*flags, "--stop_after_steps=10")
    whole.train(*flags, *change)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setenv("FAULT", "step:raise@10")
        run.train(*flags, *change)
    assert run.labels()["best"] == "step_00000009"
    told = resolved([*run.flags, *flags, "--resume=latest"])
    lost = "step 9 was saved before max_lr 0.0006 -> 0.001, min_lr 6e-05 -> 0.0001: this start"
    assert lost in " ".join(told.warnings)
    run.train(*flags, *change)
    assert not any("was saved before" in event["message"] for event in run.events("warning"))
    assert run.hashes(13) == whole.hashes(13)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("keep", "loss", "fault", "more", "best"),
    [
        (9, 0.3, "checkpoint.before_rename:enospc@12", (), 8),
        (9, 5.0, "", ("--val_tokens=64",), 12),
        (3, 5.0, "", (), 12),
    ],
)
def test_a_rewind_keeps_a_best_of_its_windows(
    keep, loss, fault, more, best, run, spoil, monkeypatch
):
    """With `keep` 3 the best before step 9 is deleted: two are better by the time of the spike."""
    plain, losses = TrainState.with_val_loss, {8: 0.5, 10: 0.4, 11: 0.3}
    monkeypatch.setattr(
        TrainState, "with_val_loss", lambda self, _: plain(self, losses.get(self.step, 6.0))
    )
    flags = (RUN[0], "--eval_freq=1", "--max_steps=14", "--on_spike=rewind")
    flags = (*flags, f"--keep_checkpoints={keep}")
    run.train(*flags, "--stop_after_steps=11")
    losses.update({10: 6.0, 11: 6.0, 12: loss})
    spoil(12, factor=50.0)
    monkeypatch.setenv("FAULT", fault)
    run.train(*flags, "--resume=latest", "--async_checkpoint=off", *more)
    assert [event["step"] for event in run.events("rewind")] == [9]
    assert run.labels()["best"] == f"step_{best:08d}"


@pytest.mark.usefixtures("soon")
def test_a_rewind_without_a_checkpoint_skips(tiny_data, tmp_path, spoil):
    run = Run(tiny_data, tmp_path, "--checkpoint_freq=0", "--eval_freq=0")
    spoil(12, factor=50.0)
    run.train("--max_steps=14", "--on_spike=rewind")
    assert run.events("rewind") == []
    assert run.events("step")[11]["updated"] is False


def test_a_spike_is_judged_by_the_spread_and_needs_a_history():
    calm = tuple(3.0 + 0.01 * (-1) ** n for n in range(64))
    assert health.z_score(3.05, calm) == pytest.approx(5.0)
    assert not health.is_spike(3.05, calm)
    assert health.is_spike(3.07, calm)
    assert not health.is_spike(1.0, calm), "a fall is no spike"
    assert not health.is_spike(1e9, calm[:63])
    assert not health.is_spike(math.nan, calm)
    for norm in (1.0, math.inf):  # four gradients in a row that are not finite end the run
        stats = SimpleNamespace(loss=9.0, grad_norm=norm)
        assert health.has_spiked(stats, calm) is math.isfinite(norm)
    flat = tuple(3.0 + 1e-6 * (-1) ** n for n in range(64))
    assert health.z_score(3.01, flat) == pytest.approx(0.01 / 0.003), "its noise is no measure"
    assert state_module.extend(calm, math.inf) == calm
    assert len(state_module.extend(calm * 4, 3.0)) == state_module.WINDOW


def test_a_state_counts_numbers_that_are_none_keeps_the_earliest_best_and_loads_as_an_older_one():
    state = TrainState().with_val_loss(1.0)
    one = {"samples": 1, "tokens": 1, "seconds": 1.0, "loss": 2.0}
    in_a_row = []
    for reason in (None, NOT_FINITE, NOT_FINITE, "spike", NOT_FINITE, None):
        state = state.advance(**one, skip_reason=reason).with_val_loss(3.0)
        in_a_row.append(state.non_finite_in_a_row)
    assert (in_a_row, state.best_step, state.best_val_loss) == ([0, 1, 2, 0, 1, 0], 1, 3.0)
    values = json.loads(json.dumps(asdict(TrainState(step=3))))
    file = JsonFile(Path("state.json"), CheckpointError)
    for name in ("non_finite_in_a_row", "recent_losses", "skipped"):
        del values[name]
    assert TrainState.from_file(file, values) == TrainState(step=3)


@pytest.mark.parametrize(
    ("seconds", "times"), [((0.001, 0.002), 0), ((1.0, 1.2), 0), ((1.0, 1.4), 1)]
)
def test_a_rank_is_slow_by_its_share_and_by_what_can_be_noticed(seconds, times):
    said: list[str] = []
    log: Any = SimpleNamespace(warn=lambda text, step: said.append(text))
    ranks: Any = SimpleNamespace(
        is_distributed=True, gather=lambda mine: [(one, 0.0, "here") for one in seconds]
    )
    stragglers = health.Stragglers(ranks, log)
    for step in range(10, 10 * health.SLOW_IN_A_ROW + 1, 10):
        stragglers.note(step, work_seconds=1.0, wait_seconds=0.0)
    assert len(said) == times


@pytest.mark.parametrize(("threads", "typed", "times"), [(2, "", 1), (1, "", 0), (2, "100", 0)])
def test_a_minute_of_other_programs_warns_where_threads_spin(threads, typed, times, monkeypatch):
    for name in health.WAITING:
        monkeypatch.delenv(name, raising=False)
    if typed:
        monkeypatch.setenv("GOMP_SPINCOUNT", typed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    most = health.MINUTE_OF_LOOKS
    crowded = [True] * (most - 1) + [False] + [True] * 2 * most
    monkeypatch.setattr(health, "is_crowded", lambda _: crowded[len(noted)])
    noted: list[int] = []
    said: list[int] = []
    logger: Any = SimpleNamespace(warn=lambda text, step: said.append(step))
    crowding = health.Crowding(Runtime(), logger)
    for step in range(len(crowded)):
        crowding._next = 0.0
        crowding.note(step)
        noted.append(step)
    assert said == [2 * most - 1] * times


@pytest.mark.parametrize("bit", [2**0, 2**13, -(2**31)])
def test_one_flipped_bit_changes_a_checksum(bit):
    values = torch.randn(33, 7)
    before = health.checksum(values)
    values.view(torch.int32)[17, 3] ^= bit
    assert health.checksum(values) != before


def test_drift_names_the_parameter_and_the_processes(monkeypatch):
    model, runtime = torch.nn.Linear(2, 2), Runtime()
    health.check_drift(model, runtime, 7)
    runtime.is_distributed = True
    monkeypatch.setattr(runtime, "gather", lambda sums: [sums, [sums[0], sums[1] + 1]])
    with pytest.raises(DriftError, match=r"step 7: .*first in bias .*rank 1") as caught:
        health.check_drift(model, runtime, 7)
    assert caught.value.exit_code == 1


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_rewound_and_skipped_steps_replay_as_they_went(run, spoil):
    """Step 10 follows step 9, but not its samples; step 14, of the samples from 128 on, is skipped."""
    spoil(12, factor=50.0)
    run.train("--max_steps=13", "--on_spike=rewind")
    assert run.events("rewind")
    spoil(17, factor=math.inf)
    run.train("--max_steps=16", "--resume=latest", "--allow_change=max_steps")
    assert [e["updated"] for e in run.events("step", attempt=2)] == [False, True, True]
    for steps in ("10:13", "14:16"):
        words = ("tiny", f"--steps={steps}", f"--checkpoint_dir={run.path.parent}")
        done = launch.worked(launch.call("replay", *words))
        assert "bitwise as logged" in done.stdout
