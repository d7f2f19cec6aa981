"""The sweep over our own settings: what a variant is, what the time allows, what fails, and how hot the card was."""

import dataclasses
import os
import time
from typing import Any

import pytest

from benchmarks import contestants, race, running, trainers
from benchmarks.contestants import Contestant, Step
from benchmarks.sizes import SIZES, VARIANTS
from fake_trainer import entry_of, fake_trainer, place_in, plan
from gpt2lab.errors import CheckError, ConfigError
from launch import HANG_SECONDS, write_program


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("size", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_a_variant_trains_on_as_many_tokens(size, name, tmp_path):
    variant = (name, VARIANTS[name])
    trainer = contestants.ours(place_in(tmp_path), SIZES[size], dtype="auto", variant=variant)
    assert (trainer.name, trainer.size.tokens) == (name, SIZES[size].tokens)
    plain = contestants.ours(place_in(tmp_path), SIZES[size], dtype="auto")
    assert (trainer.program, trainer.environment) != (plain.program, plain.environment)
    assert f"--total_batch_size={SIZES[size].tokens}" in trainer.program


def test_a_step_that_cannot_be_cut_is_rejected():
    with pytest.raises(ConfigError, match=r"1 x 8 sequences cannot be cut .* 2 times as large"):
        VARIANTS["micro_double"].cut(SIZES["mid"])


def test_a_contestant_that_fails_costs_the_others_nothing(tmp_path):
    """Except ours, which all are compared with."""
    entries = [
        race.Entry(dataclasses.replace(fake_trainer(tmp_path / name, *code), name=name), [])
        for name, code in (("ours", ()), ("broken", ("1",)), ("other", ()))
    ]
    said: list[str] = []
    trainers._race(entries, plan(), trainers._Clock(None), said.append)
    assert [len(entry.runs) for entry in entries] == [2, 0, 1]
    assert entries[1].failed == "broken ended by itself: out of luck"
    assert "  broken: failed: broken ended by itself: out of luck" in said
    with pytest.raises(CheckError, match="broken: broken ended by itself: out of luck"):
        trainers.check_all_ran({"tiny256": {"failed": {"broken": entries[1].failed}}})
    trainers.check_all_ran({"tiny256": {"failed": {}}})
    entries[1].failed = None
    with pytest.raises(CheckError, match="broken ended by itself"):
        trainers._race(entries[1::-1], plan(), trainers._Clock(None), said.append)


def test_what_would_end_too_late_is_left_out_but_ours_comes_last(tmp_path, monkeypatch):
    """Of a clock that says ten seconds for every process, and 35 in all: ours, one, no more, ours."""
    now = [0.0]
    monkeypatch.setattr(trainers.time, "monotonic", lambda: now[0])

    def run(contestant: Contestant, **unused: Any) -> running.Run:
        now[0] += 10
        return running.Run((Step(1.0, 5.0), Step(1.0, 4.0)), 1, 0.0, 1, None)

    monkeypatch.setattr(trainers, "run", run)
    entries = [entry_of(name) for name in ("ours", "b", "c", "d")]
    for entry in entries:
        place = place_in(tmp_path / entry.name)
        entry.contestant = dataclasses.replace(entry.contestant, place=place)
    said: list[str] = []
    trainers._race(entries, plan(), trainers._Clock(35.0), said.append)
    assert [len(entry.runs) for entry in entries] == [2, 1, 0, 0]
    assert [entry.failed for entry in entries] == [None] * 4
    assert "  c: left out, 15 s are left of --total_seconds" in said


def test_a_gpu_is_watched_through_nvidia_smi(tmp_path, monkeypatch):
    """A script of that name plays it: what it prints is read, and it is ended with the watch."""
    text = '#!/bin/sh\necho "$@" > args\necho "1980, 650.0, 61"\necho "[N/A], 1, 1"\n'
    write_program(tmp_path / "nvidia-smi", f'{text}echo "1960, 690.0, 64"\nexec sleep 60\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    watch = running.GpuWatch(tmp_path / "seen.csv")
    deadline = time.monotonic() + HANG_SECONDS
    while (tmp_path / "seen.csv").read_text().count("\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert watch.stop() == running.Weather(1970.0, 670.0, 64.0)
    assert "--id=3" in (tmp_path / "args").read_text()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert running.GpuWatch(tmp_path / "none.csv").stop() is None
    assert running.read_weather("Unable to determine the device handle\n") is None
