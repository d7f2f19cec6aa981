"""Real runs and time: forecast and score, what the next forecast learns, --max_hours, --fit_schedule, auto batch."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

import launch
from forecasting import record
from gpt2lab.config.presets import preset
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config, ModelName
from gpt2lab.config.settings import LEAVES, override, to_flat
from gpt2lab.distributed import processor
from gpt2lab.errors import ConfigError
from gpt2lab.planner import calibration, measuring
from gpt2lab.planner.auto import TrainingPlanner, steps_in_window
from gpt2lab.planner.hardware import NoSourceError
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import DetectedHardware
from gpt2lab.runs import history
from gpt2lab.training.progress import Interval, RunClock
from gpt2lab.training.resolve import resolve
from gpt2lab.training.stop import find_deadlines, find_due
from launch import events, steps, train_in_forks
from long_logs import lines_of_a_start
from plain_log import log_of
from tiny import fresh, parse, train


def estimate_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "estimate.json").read_text())


def test_a_finished_run_is_compared_with_its_forecast_and_the_next_one_learns(tiny_flags, tmp_path):
    runs = tmp_path / "runs"
    long = ["--max_steps=30", "--eval_freq=10", "--checkpoint_freq=10", "--val_tokens=1B"]
    train([*tiny_flags, *long, "--stop_after_steps=15"])
    predicted = estimate_of(runs / "tiny")
    assert predicted["actual"] is None
    assert predicted["throughput"]["source"] == "cpu-matmul"
    assert predicted["breakdown"]["eval_s"] < 600, "there are some hundred validation tokens"
    assert calibration.read(runs) == []
    train([*tiny_flags, "--resume=latest"])
    done = estimate_of(runs / "tiny")
    assert done["estimate"] == predicted["estimate"], "predicted once, at the beginning"
    assert (done["actual"]["starts"], done["actual"]["steps"]) == (2, 30)
    assert done["actual"]["time_accuracy"] > 0
    (line,) = calibration.read(runs)
    assert line["source"] == "run"
    assert {"eval", "checkpoint", "start"} <= set(line["ratios"])
    train([*tiny_flags, *long, "--run_name=next"])
    assert estimate_of(runs / "next")["throughput"]["source"] == "calibrated"
    logged = steps(runs / "next")[30]
    assert logged["on_track"] in (True, False)
    assert logged["cpu_seconds"] > 0
    assert logged["elapsed_seconds"] > logged["step_seconds"]


ENDLESS = ["--max_steps=1000000", "--checkpoint_freq=0", "--eval_freq=0", "--sample_freq=0"]


@pytest.mark.slow
def test_max_hours_stops_and_saves_before_the_limit_and_the_run_goes_on(tiny_flags, tmp_path):
    run_dir = tmp_path / "runs" / "tiny"
    train([*tiny_flags, *ENDLESS, "--max_hours=0.001"])
    (stop,) = events(run_dir, "stop")
    assert stop["reason"] == "max_hours"
    saved = events(run_dir, "checkpoint")[-1]
    assert saved["step"] == stop["step"] == max(steps(run_dir))
    assert saved["kind"] in ("emergency", "epoch")  # the last step may have ended an epoch
    assert json.loads((run_dir / "status.json").read_text())["exit_code"] == 0
    train([*tiny_flags, "--resume=latest", "--max_hours=0.0006"])
    assert max(steps(run_dir)) > stop["step"]


@pytest.mark.slow
def test_max_hours_ends_all_processes_at_one_step(tiny_flags, tmp_path):
    launch.worked(train_in_forks([*tiny_flags, *ENDLESS, "--max_hours=0.002"], world=2))
    (stop,) = events(tmp_path / "runs" / "tiny", "stop")
    assert stop["reason"] == "max_hours"


def test_fit_schedule_plans_by_what_was_measured_and_rejects_to_guess(tiny_flags, tmp_path):
    fit = ["--fit_schedule", "--max_hours=0.05", "--max_steps=1000000", "--stop_after_steps=1"]
    with pytest.raises(ConfigError, match="--measure"):
        train([*tiny_flags, *fit, "--run_name=early"])
    assert not (tmp_path / "runs" / "early").exists()
    train([*tiny_flags, "--max_steps=30"])
    train([*tiny_flags, *fit, "--run_name=fitted"])
    (begin,) = events(tmp_path / "runs" / "fitted", "begin")
    assert 1 <= begin["max_steps"] < 1_000_000
    predicted = estimate_of(tmp_path / "runs" / "fitted")["estimate"]
    assert predicted["high_hours"] <= 0.05
    planner = TrainingPlanner(fits_schedule=True)
    small = "--val_tokens=1B"  # there are some hundred
    command = parse([*tiny_flags, *fit, small, "--run_name=new"])
    planned = resolve(command, world_size=1, set_aside=False, planner=planner)
    assert 1 <= planned.plan.max_steps < 1_000_000, "a dry run plans what the run would do"
    with pytest.raises(ConfigError, match="--max_hours"):
        train([*tiny_flags, "--fit_schedule", "--run_name=other"])
    with pytest.raises(ConfigError, match="fresh"):
        parse(["--fit_schedule", "--resume=latest"])


@pytest.mark.parametrize(
    "typed", [["--mini_batch_size", "auto"], ["--mini_batch_size=auto"], ["--mini-batch-size=auto"]]
)
def test_an_automatic_mini_batch_is_a_wish_and_the_setting_stays_a_number(typed):
    command = parse(["--model=gpt2-nano", *typed, "--max_steps=5"])
    assert (command.open_settings, command.config.batch.mini_batch_size) == ({"mini_batch_size"}, 8)
    assert not parse(["--mini_batch_size=4"]).open_settings
    assert "mini_batch_size" not in command.chosen


def test_the_poorest_process_decides_the_mini_batch_of_all(tiny_flags, monkeypatch):
    offered = []

    def search(job: Job, folder: Path, *, memory_bytes: float, **_: object) -> dict[str, int]:
        offered.append(memory_bytes)
        return {"mini_batch_size": 2}

    monkeypatch.setattr(measuring, "find_batch_size", search)
    command = parse([*tiny_flags, "--mini_batch_size=auto"])
    start = resolve(command, world_size=1, set_aside=False)

    def choose(request: RunRequest, memory: list[float | None]) -> dict[str, Any]:
        planner, plan, folder = TrainingPlanner(), start.plan, start.run_dir
        planner.memory = memory
        return planner.choose(request, start.config, plan, run_dir=folder)

    assert (choose(command, [8e9, None, 2e9, 4e9]), offered) == ({"mini_batch_size": 2}, [2e9])
    system = start.config.system
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    quarter = TrainingPlanner().free_memory(system)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = TrainingPlanner().free_memory(system)
    assert quarter == pytest.approx(alone / 4, rel=0.1)
    assert choose(parse(tiny_flags), [None]) == {}


@pytest.mark.slow
def test_an_automatic_mini_batch_is_found_stored_and_used_again(tiny_flags, tmp_path):
    train([*tiny_flags, "--mini_batch_size=auto", "--max_steps=4", "--stop_after_steps=2"])
    run_dir = tmp_path / "runs" / "tiny"
    found = json.loads((run_dir / "config.json").read_text())["mini_batch_size"]
    assert 8 % found == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"], "trials leave nothing"
    train([*tiny_flags, "--mini_batch_size=auto", "--resume=latest"])
    assert json.loads((run_dir / "config.json").read_text())["mini_batch_size"] == found
    train([*tiny_flags, "--max_steps=4", "--run_name=other"])
    other = steps(tmp_path / "runs" / "other")
    for step, event in steps(run_dir).items():
        assert event["loss"] == pytest.approx(other[step]["loss"], rel=1e-5)
        assert event["batch_hash"] == other[step]["batch_hash"]


def clock(hours: float | None, *, ago: float, expected: float | None = None) -> RunClock:
    length = dataclasses.replace(Config().length, max_hours=hours)
    config = dataclasses.replace(Config(), length=length)
    return RunClock(config, last_step=1000, began=time.monotonic() - ago, expected_seconds=expected)


def test_max_hours_ends_a_start_before_a_slow_step_and_the_save(monkeypatch):
    progress = clock(1.0, ago=0.0).progress
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    assert find_deadlines(None, {}, max_hours=1.0) == {"max_hours": pytest.approx(8600)}
    assert progress.stop_seconds(4.0) == 6.0
    for _ in range(5):
        progress.record_step(10.0)
    assert progress.stop_seconds(20.0) == 45.0
    near = {"max_hours": 5044.0}
    assert find_due(near, margin_seconds=progress.stop_seconds(20.0)) == "max_hours"
    assert find_due(near, margin_seconds=10.0) is None
    assert find_deadlines(None, {}) == {}


def test_on_track_is_judged_by_the_limit_or_else_the_forecast(tmp_path):
    left = Interval(100.0, 80.0, 130.0)
    assert clock(1.0, ago=3480).is_on_track(left) is False
    assert clock(1.0, ago=3400).is_on_track(left) is True
    assert clock(None, ago=50, expected=140.0).is_on_track(left) is False
    assert clock(None, ago=50, expected=160.0).is_on_track(left) is True
    assert clock(None, ago=50).is_on_track(left) is None
    assert clock(1.0, ago=50).is_on_track(None) is None
    (tmp_path / "metrics.jsonl").write_text("".join(lines_of_a_start(3)))
    before = history.read_log(tmp_path).spent_seconds()
    for spare, on_track in ((-1.0, False), (1.0, True)):
        resumed = clock(None, ago=50, expected=150.0 + before + spare)
        resumed.take_over(tmp_path, same_hardware=False)
        assert resumed.is_on_track(left) is on_track
    with open(tmp_path / "metrics.jsonl", "a") as log:
        log.writelines(lines_of_a_start(3, attempt=2, max_steps=2000))
    resumed.take_over(tmp_path, same_hardware=False)
    assert resumed.is_on_track(left) is None, "the forecast is of another length"
    # A pace that is inherited is that of a step of this start: of 524,288 tokens, no more of 64.
    resumed = clock(None, ago=0)
    resumed.take_over(tmp_path, same_hardware=True)
    third = history.read_log(tmp_path).column("step_seconds")[2]  # after the warm-up
    assert resumed.progress.pace().value == pytest.approx(third * 524_288 / 64)


def test_a_start_counts_from_the_beginning_of_its_process():
    """A moment between those before its start and after its end, by the clock that all processes share."""
    code = "from gpt2lab.commands.train import _process_began; print(_process_began())"
    before = time.monotonic()
    done = launch.python("-c", code)
    tick = 0.02  # the system counts in hundredths of a second
    assert before - tick <= float(done.stdout) <= time.monotonic()


# Trials of a machine: they train the real job, as long as they are asked to, and give a rate or an error.
# 3.2 million parameters in its vocabulary, so that a save is assumed to take 0.39 s and a stop 0.58 s.
MARGIN_SECONDS = 1.5 * 12 * 3.2e6 / 1e8


def small_job(model: ModelName = "gpt2-nano", *, ranks: int = 1, **settings: Any) -> Job:
    values = {"context_length": 16, "total_batch_size": 128, "mini_batch_size": 2}
    values |= {"data_dir": ("/nonexistent",), "device": "cpu"}
    config = override(preset(model), values | settings)
    return Job(config, max_steps=9, world_size=ranks, dtype="fp32", compiled=False)


def test_few_steps_that_fit_are_planned_as_the_cpu_takes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    job = dataclasses.replace(small_job(max_hours=0.06), max_steps=10**6, compiled=True)
    here = {"device": processor.cpu_name(), "threads": 2, "step_seconds": 9.0}
    records = [record(**here, compile=True, ratios={"compile": 99.0})]
    monkeypatch.setattr(calibration, "read", lambda _: records)
    with pytest.raises(ConfigError, match="estimate --measure --model gpt2-nano --compile off"):
        steps_in_window(job, DetectedHardware(()), tmp_path)
    records.append(record(**here))
    found = steps_in_window(job, DetectedHardware(()), tmp_path)
    plain = dataclasses.replace(job, compiled=False, max_steps=199)
    assert found == steps_in_window(plain, DetectedHardware(()), tmp_path) < 199


def test_the_mean_of_the_last_weights_is_evaluated_and_is_in_no_trial():
    """A run's memory is a trial's and the difference between the two by the closed form."""
    jobs = [small_job(eval_freq=4, average_tail=tail) for tail in (0.0, 0.2)]
    assert [job.count("eval") for job in jobs] == [4, 5]  # at 0, 4, 8 and 9
    assert measuring.trial_job(jobs[0], 2) == measuring.trial_job(jobs[1], 2)


@pytest.mark.slow
def test_a_trial_has_a_rate_though_a_save_may_take_longer_than_it(tmp_path):
    job = small_job("modern-nano", activation_checkpointing="block")
    trial = measuring.run_trial(job, tmp_path, seconds=0.9 * MARGIN_SECONDS)
    assert len(trial.log.numbers) >= measuring.FEWEST_STEPS
    assert trial.tokens_per_second
    assert list(tmp_path.iterdir()) == []
    wanted, plain = to_flat(job.config), to_flat(Config())
    for name in ("optimizer", "positions", "norm", "qk_norm", "activation"):
        assert trial.config[name] == wanted[name] != plain[name]


@pytest.mark.parametrize("said", ["killed by somebody", ""])
def test_a_trainer_that_dies_is_named_by_its_last_line(tmp_path, monkeypatch, said):
    program = ["-c", f"import sys; sys.stderr.write({said!r}); sys.exit(3)"]
    monkeypatch.setattr(measuring.paths, "trainer", lambda _: program)
    with pytest.raises(ConfigError, match=f"rejects this run: {said or 'exit code 3'}$"):
        measuring.run_trial(small_job(), tmp_path, steps=4)


def test_a_trial_without_a_rate_is_no_answer(tmp_path, monkeypatch):
    """A Slurm job that is about to end stops each trial at its first step."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1))
    with pytest.raises(NoSourceError, match=r"mini_batch_size 1: the trial took [01] of 6 steps"):
        how = {"max_batch": 8, "memory_bytes": None, "target": 0.9, "on_gpu": False}
        measuring.find_batch_size(small_job(), tmp_path, **how)


def test_a_size_that_was_timed_for_its_memory_counts_for_its_speed(tmp_path, monkeypatch):
    """On a device whose steps are long no size beyond the two of the memory's line is tried."""
    seen: list[int] = []

    def trial(job: Job, folder: Path, **_: Any) -> measuring.Trial:
        seen.append(job.micro_batch)
        rate = {1: 0.5, 2: 0.9}[job.micro_batch]
        step = {"event": "step", "attempt": 1, "time": 1.0, "tokens_per_second": rate}
        log = log_of(step | {"step": n, "peak_memory_bytes": 10**6} for n in range(1, 7))
        return measuring.Trial(log, {}, {}, None, out_of_memory=False)

    monkeypatch.setattr(measuring, "run_trial", trial)
    how = {"max_batch": 8, "memory_bytes": 1e12, "target": 0.9, "on_gpu": False}
    found = measuring.find_batch_size(small_job(), tmp_path, **how)
    assert seen == [1, 2]
    assert (found["mini_batch_size"], found["largest_verified"]) == (2, 2)


OF_A_STEP: list[dict[str, Any]] = [
    *({"positions": "rotary"}, {"norm": "rmsnorm"}, {"qk_norm": "rmsnorm"}, {"dropout": 0.1}),
    *({"activation": "relu2"}, {"optimizer": "muon"}, {"parallel": "zero1"}, {"device": "cuda"}),
    {"parallel": "fsdp", "fsdp_offload": True},
    {"parallel": "fsdp", "fsdp_param_dtype": "bf16"},
    *({"activation_checkpointing": "block"}, {"activation_checkpointing": "selective"}),
    *({"attention": "flash"}, {"ddp_bucket_mb": 100.0}, {"reduce": "exact"}, {"grad_clip": 0.0}),
    *({"deterministic": True}, {"n_layer": 3, "n_embd": 96, "n_head": 3, "vocab_size": 512}),
]


@pytest.mark.parametrize("settings", OF_A_STEP, ids=str)
def test_a_trial_has_every_setting_that_its_speed_depends_on(settings, tmp_path):
    job = small_job(ranks=2, **settings)
    file = measuring.write_trial(job, tmp_path, seconds=9.0, steps=6)  # which the trainer reads
    wanted, found = to_flat(job.config), fresh(f"--config={file}")
    model = {name for name, (section, _) in LEAVES.items() if section == "model"}
    for name in {*model, *settings, "total_batch_size", "mini_batch_size"} - {"model"}:
        assert found[name] == wanted[name], name


def test_ranks_that_share_what_one_holds_are_tried_together(monkeypatch):
    """One rank alone would hold all of it; those of other machines cannot be started from here."""
    job = small_job(ranks=4, mini_batch_size=1, total_batch_size=128)
    shared = small_job(ranks=4, mini_batch_size=1, total_batch_size=128, parallel="fsdp")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert measuring.trial_job(job, 2).world_size == 1
    assert measuring.trial_job(shared, 2).world_size == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    trial = measuring.trial_job(shared, 2)
    assert (trial.world_size, trial.accumulation, trial.micro_batch) == (2, 1, 2)
    assert dataclasses.replace(trial, world_size=4).parallel == shared.parallel == "fsdp"


@pytest.mark.slow
def test_a_real_trial_of_ranks_that_share_has_them_all(tmp_path):
    job = small_job(ranks=2, parallel="zero1")
    trial = measuring.run_trial(measuring.trial_job(job, 2), tmp_path, steps=4)
    assert (trial.config["parallel"], trial.environment["world_size"]) == ("zero1", 2)
    assert trial.tokens_per_second
