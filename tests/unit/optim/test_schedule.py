"""The learning rate against formulas written down a second time."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2lab.config.request import default_warmup
from gpt2lab.config.schema import OptimConfig
from gpt2lab.optim.schedule import describe_rates, lr_at

MAX, MIN = 6e-4, 6e-5
examples = settings(derandomize=True, max_examples=150, deadline=None)


def optim(schedule: str = "cosine", *, warmup: int = 10, **more: float | str) -> OptimConfig:
    values = {"max_lr": MAX, "min_lr": MIN, **more}
    return OptimConfig(lr_schedule=schedule, warmup_steps=warmup, **values)


def cosine(n: int, warmup: int, last: int) -> float:
    return MIN + (MAX - MIN) * (1 + math.cos(math.pi * (n - warmup) / (last - warmup))) / 2


def line(n: int, start: int, last: int) -> float:
    return (MAX * (last - n) + MIN * (n - start)) / (last - start)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_warm_up_is_a_line_from_zero_that_reaches_the_peak_at_its_last_step(schedule):
    for n in range(1, 11):
        assert lr_at(n, optim(schedule), max_steps=100) == pytest.approx(MAX * n / 10, rel=1e-12)
    assert lr_at(10, optim(schedule), max_steps=100) == MAX


@pytest.mark.parametrize("warmup", [10, 0])
@pytest.mark.parametrize(("schedule", "formula"), [("cosine", cosine), ("linear", line)])
def test_between_warm_up_and_the_end(schedule, formula, warmup):
    for n in range(max(1, warmup), 101):
        found = lr_at(n, optim(schedule, warmup=warmup, wsd_shape="sqrt"), max_steps=100)
        assert found == pytest.approx(formula(n, warmup, 100), rel=1e-9)
    assert found == pytest.approx(MIN, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "shape", "fallen"),
    [
        ("wsd", "linear", lambda n: (n - 75) / 25),
        ("wsd", "sqrt", lambda n: ((n - 75) / 25) ** 0.5),
        ("trapezoid", "sqrt", lambda n: (n - 76) / 25),  # it has one shape
    ],
)
def test_the_peak_is_held_until_the_last_part_decays(schedule, shape, fallen):
    decay = optim(schedule, wsd_decay=0.25, wsd_shape=shape)
    for n in range(10, 101):
        expected = MAX - (MAX - MIN) * max(0.0, fallen(max(n, 75)))
        assert lr_at(n, decay, max_steps=100) == pytest.approx(expected, rel=1e-9)


def test_wsd_decay_never_begins_inside_the_warm_up():
    settings_ = optim("wsd", warmup=60, wsd_decay=0.9)
    assert lr_at(30, settings_, max_steps=100) == pytest.approx(MAX / 2, rel=1e-12)
    assert lr_at(60, settings_, max_steps=100) == MAX
    assert lr_at(80, settings_, max_steps=100) == pytest.approx(line(80, 60, 100), rel=1e-9)


@pytest.mark.parametrize("missing", ["warmup_steps", "min_lr"])
def test_schedule_that_was_not_resolved_is_rejected(missing):
    values = {"warmup_steps": 10, "min_lr": MIN, missing: None}
    with pytest.raises(ValueError, match="resolved"):
        lr_at(50, OptimConfig(**values), max_steps=100)


@pytest.mark.parametrize(
    ("max_steps", "warmup"),
    [(1, 0), (9, 0), (10, 1), (250, 25), (7149, 714), (7150, 715), (19073, 715)],
)
def test_default_warm_up_is_715_steps_or_a_tenth(max_steps, warmup):
    assert default_warmup(max_steps) == warmup


@examples
@given(st.data())
def test_rate_stays_in_its_bounds_and_only_falls_after_the_warm_up(data):
    last = data.draw(st.integers(1, 300))
    warmup = data.draw(st.integers(0, last))
    schedule = data.draw(st.sampled_from(["cosine", "linear", "wsd"]))
    floor = data.draw(st.floats(0.0, 1.0))
    decay = data.draw(st.floats(0.01, 1.0))
    config = optim(schedule, warmup=warmup, max_lr=1.0, min_lr=floor, wsd_decay=decay)
    rates = {n: lr_at(n, config, max_steps=last) for n in range(1, last + 1)}
    assert all(0 <= rate <= 1.0 for rate in rates.values())
    for n in range(1, last):
        if n < warmup:
            assert rates[n] < rates[n + 1], "rises while warming up"
        else:
            assert rates[n] >= rates[n + 1] - 1e-12
    assert all(rates[n] >= floor - 1e-12 for n in range(max(1, warmup), last + 1))
    never_decays = schedule == "wsd" and round(decay * last) == 0
    if warmup < last and not never_decays:
        assert rates[last] == pytest.approx(floor, abs=1e-12)


def test_a_short_wsd_run_decays():
    optim = OptimConfig(lr_schedule="wsd", wsd_decay=0.1, warmup_steps=0, min_lr=6e-5)
    assert lr_at(4, optim, max_steps=4) == pytest.approx(6e-5)
    assert lr_at(3, optim, max_steps=4) == optim.max_lr
    muon = dataclasses.replace(optim, optimizer="muon", muon_lr=6e-3, head_lr=0.01)
    assert describe_rates(muon) == "muon 0.006 -> 0.0006, adamw 0.0006 -> 6e-05, head 0.01 -> 0.001"
