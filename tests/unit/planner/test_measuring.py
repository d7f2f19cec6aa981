"""Trials of a machine: they train the real job, as long as they are asked to, and give a rate or an error."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from gpt2lab.config.presets import preset
from gpt2lab.config.schema import Config, ModelName
from gpt2lab.config.settings import LEAVES, override, to_flat
from gpt2lab.errors import NoSourceError
from gpt2lab.planner import measuring
from gpt2lab.planner.job import Job
from plain_log import log_of
from tiny import fresh

# 3.2 million parameters in its vocabulary, so that a save is assumed to take 0.39 s and a stop 0.58 s.
MARGIN_SECONDS = 1.5 * 12 * 3.2e6 / 1e8


def small_job(model: ModelName = "gpt2-nano", *, ranks: int = 1, **settings: Any) -> Job:
    values = {"context_length": 16, "total_batch_size": 128, "mini_batch_size": 2}
    values |= {"data_dir": ("/nonexistent",), "device": "cpu"}
    config = override(preset(model), values | settings)
    return Job(config, max_steps=9, world_size=ranks, dtype="fp32", compiled=False)


def test_a_trial_has_a_rate_though_a_save_may_take_longer_than_it(tmp_path):
    job = small_job("modern-nano", activation_checkpointing="block")
    trial = measuring.run_trial(job, tmp_path, seconds=0.9 * MARGIN_SECONDS)
    assert len(trial.log.numbers) >= measuring.FEWEST_STEPS
    assert trial.tokens_per_second
    assert list(tmp_path.iterdir()) == []
    wanted, plain = to_flat(job.config), to_flat(Config())
    for name in ("optimizer", "positions", "norm", "qk_norm", "activation"):
        assert trial.config[name] == wanted[name] != plain[name]


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
    assert trial.config["parallel"] == "zero1"
    assert trial.environment["world_size"] == 2
    assert trial.tokens_per_second
