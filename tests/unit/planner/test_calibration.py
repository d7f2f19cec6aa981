"""What a forecast learns from runs on the machine, and which of them count."""

import dataclasses
import json

import numpy as np
import pytest

from forecasting import KNOWN, on, record
from gpt2lab.config.presets import preset
from gpt2lab.config.settings import override
from gpt2lab.model.counts import count_adapters, count_parameters, training_flops_per_token
from gpt2lab.planner import calibration, measuring, request, timing
from gpt2lab.planner.calibration import this_machine
from gpt2lab.planner.estimate import EventCosts, event_costs
from gpt2lab.planner.hardware import NoSourceError
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import DetectedHardware, GpuState
from gpt2lab.planner.request import EstimateRequest, Predictor
from gpt2lab.planner.timing import MeasuredStep, Rates, fit_rates, work
from plain_log import log_of

KIND = dict(device="x", world=1, threads=2, dtype="fp32", compile=False, parallel="ddp")
PRIOR = timing.processor(1e11, KNOWN, bf16=False, compiled=True)
NANO = preset("gpt2-nano").model
AMOUNT = work(NANO, micro_batch=8, accumulation=4)
STEP = {"event": "step", "attempt": 1, "time": 1.0, "step_seconds": 0.5, "peak_memory_bytes": 1}


def test_rates_are_recovered_from_runs_of_different_shapes():
    truth = Rates((2e-12, 6e-12, 3e-9, 5e-10, 2e-9, 4e-4, 3e-12), np.zeros((7, 7)), "truth")
    shapes = [
        *((2, 128, 4096, 64), (6, 256, 1024, 128), (3, 64, 50304, 256), (8, 192, 2048, 64)),
        *((1, 512, 8192, 32), (4, 384, 512, 512), (12, 96, 1024, 128), (2, 640, 1024, 64)),
    ]
    base = preset("gpt2").model
    models = [
        dataclasses.replace(base, n_layer=L, n_embd=C, n_head=1, vocab_size=V, context_length=T)
        for L, C, V, T in shapes
    ]
    sizes = [work(m, micro_batch=4, accumulation=1) for m in models]
    seen = [MeasuredStep(w, truth.seconds(w)) for w in sizes]
    rates = fit_rates(PRIOR, seen[:-1], spread=1.0)
    assert rates.seconds(seen[-1].work) == pytest.approx(seen[-1].seconds, rel=0.1)
    assert rates.sigma(seen[-1].work) < PRIOR.sigma(seen[-1].work)
    one = fit_rates(PRIOR, seen[:1], spread=1.0)
    assert one.seconds(seen[0].work) == pytest.approx(seen[0].seconds, rel=0.05)


def test_only_runs_of_the_same_kind_of_machine_count_and_busy_ones_only_alone(tmp_path):
    path = tmp_path / calibration.FILE
    lines = [record(), record(device="y", step_seconds=9.0), record(others=0.8, step_seconds=2.0)]
    lines += [record(ratios=[1.0]), record(ratios={"eval": "x"}), record(others="x")]  # edited
    lines += [record(ratios={"eval": -1}), record(ratios={"start": float("inf")})]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn": ')
    records = calibration.read(tmp_path)
    assert len(records) == 3
    rates, ratios = calibration.calibrate(PRIOR, records, KIND, spread=1.0)
    assert rates.seconds(AMOUNT) == pytest.approx(0.5, rel=0.05)
    assert ratios == {"eval": 0.3}
    slower = [record(others=0.9, step_seconds=8.0)] * 3  # the same work
    busy, events = calibration.calibrate(PRIOR, [records[2], *slower], KIND, spread=1.0)
    assert busy.seconds(AMOUNT) == pytest.approx(2.0, rel=0.05)
    assert busy.sigma(AMOUNT) > rates.sigma(AMOUNT)
    assert events == {}
    other = KIND | {"device": "z"}
    assert calibration.calibrate(PRIOR, records, other, spread=1.0)[0] is PRIOR


def test_recomputing_and_muons_rounds_cost_time_and_are_learned_as_what_they_were():
    model = preset("gpt2").model
    modes = ("none", "selective", "block")
    works = (work(model, micro_batch=8, accumulation=2, recompute=mode) for mode in modes)
    plain, selective, block = map(on("H100").rates.seconds, works)
    assert plain < selective < block < 4 / 3 * plain, "the head and the update are done once"
    learned, _ = calibration.calibrate(PRIOR, [record(recompute="block")], KIND, spread=1.0)
    amount = work(NANO, micro_batch=8, accumulation=4, recompute="block")
    assert learned.seconds(amount) == pytest.approx(0.5, rel=0.05)
    muon = work(NANO, micro_batch=8, accumulation=4, optimizer="muon")
    assert PRIOR.seconds(muon) > PRIOR.seconds(AMOUNT)
    learned, _ = calibration.calibrate(PRIOR, [record(optimizer="muon")], KIND, spread=1.0)
    assert learned.seconds(muon) == pytest.approx(0.5, rel=0.05)
    assert learned.seconds(AMOUNT) < learned.seconds(muon)


def test_runs_that_share_in_another_way_do_not_count():
    by_ddp = record(world=2)  # older lines have no `parallel`
    by_fsdp = record(world=2, parallel="fsdp", step_seconds=2.0)
    for mode, seconds in (("ddp", 0.5), ("fsdp", 2.0)):
        kind = KIND | {"world": 2, "parallel": mode}
        rates, _ = calibration.calibrate(PRIOR, [by_ddp, by_fsdp], kind, spread=1.0)
        assert rates.observations == 1
        assert rates.seconds(AMOUNT) == pytest.approx(seconds, rel=0.05)


def test_adapters_spare_the_gradients_of_frozen_matrices_and_their_update():
    config = preset("gpt2-micro")
    tuned = override(config, {"instructions": "demo", "lora_r": 8})
    for settings, updated in (
        (config, count_parameters(config.model)),
        (tuned, count_adapters(tuned.model, tuned.tuning)),
    ):
        job = Job(settings, max_steps=10, world_size=1, dtype="fp32", compiled=False)
        matmul, attention, _, _, updates, *_ = job.work
        tokens = settings.batch.total_batch_size
        assert matmul + attention == pytest.approx(training_flops_per_token(settings) * tokens)
        assert updates == updated


def test_the_cost_of_hellaswag_is_learned_from_a_run(tmp_path):
    """An item in one text that costs as much as training on 100 tokens, predicted for two texts and for one."""
    few = tmp_path / "few.jsonl"
    few.write_text("{}\n" * 12)
    config = preset("gpt2-nano")
    events = [STEP | {"step": n, "elapsed_seconds": n / 2} for n in range(1, 21)]
    token = 0.5 / config.batch.total_batch_size
    scored = {"n": 30, "seconds": 30 * 2 * 100 * token}
    events.append({"event": "hellaswag", "time": 1.0, "attempt": 1, "step": 20, **scored})
    environment = {"device": "x", "world_size": 1, "threads": 2, "dtype": "fp32"}
    line = calibration.record_of(
        log_of(events),
        environment | {"compile": "off", "mini_batch_size": config.batch.mini_batch_size},
        vars(config.model) | vars(config.batch) | {"newton_schulz": "exact"},
        others=0.0,
        source="run",
    )
    assert line["ratios"]["hellaswag"] == pytest.approx(100)
    assert line["newton_schulz"] == "exact"  # which Muon's rounds are counted by
    for metrics, texts, path, items in (
        *(("all", 2, None, 30), ("harness", 1, tmp_path / "not here", 30)),
        ("harness", 1, few, 12),
    ):
        of = {"hellaswag_metrics": metrics, "hellaswag_path": path, "hellaswag_limit": 30}
        asked = override(config, of)
        job = Job(asked, max_steps=10, world_size=1, dtype="bf16", compiled=False)
        a_card = on("H100", compiled=False)
        costs = event_costs(job, dataclasses.replace(a_card, ratios=line["ratios"]), KNOWN)
        one = work(config.model, micro_batch=job.micro_batch, accumulation=1)
        training = a_card.rates.seconds((*one[:4], 0.0, *one[5:])) / job.micro_batch
        expected = items * texts * 100 * training / config.model.context_length
        assert costs.seconds["hellaswag"] == pytest.approx(expected)
    # Event costs know what was measured.
    costs = EventCosts({"eval": 10.0, "sample": 1.0}, frozenset({"eval"}))
    assert costs.interval("eval", 3).value == 30.0
    assert costs.interval("eval", 1).high / 10 < costs.interval("sample", 1).high


@pytest.mark.parametrize(("name", "dtype"), [("NVIDIA Mystery 9", "bf16"), ("NVIDIA H100", "fp32")])
def test_a_gpu_without_a_rate_is_measured_never_guessed(name, dtype):
    card = GpuState(0, name, 2**35, 2**35, 0.0, "1", "9.0", None, None)
    job = Job(preset("gpt2-nano"), max_steps=1, world_size=1, dtype=dtype, compiled=True)
    with pytest.raises(NoSourceError, match="--measure"):
        this_machine(DetectedHardware((card,)), KNOWN, [], job)
    seen = record(device=name, dtype=dtype, compile=True, threads=1)
    found = this_machine(DetectedHardware((card,)), KNOWN, [seen], job)
    assert found.rates.seconds(AMOUNT) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(("busy", "verdict"), [(97.0, "rejected"), (30.0, "wider"), (3.0, "good")])
def test_a_gpu_that_others_use_is_no_measure(busy, verdict, tmp_path, monkeypatch, capsys):
    card = GpuState(0, "NVIDIA H200", 2**37, 2**37, busy, "1", "9.0", None, None)
    monkeypatch.setattr(request, "detect_hardware", lambda: DetectedHardware((card,)))
    events = [STEP | {"step": n, "elapsed_seconds": n / 2} for n in range(1, 9)]
    config = preset("gpt2-nano")
    environment = {"device": card.name, "world_size": 1, "threads": 2, "dtype": "bf16"}
    environment |= {"compile": "on", "mini_batch_size": config.batch.mini_batch_size}
    flat = vars(config.model) | vars(config.batch)
    trial = measuring.Trial(log_of(events), environment, flat, 0.01, out_of_memory=False)
    monkeypatch.setattr(measuring, "run_trial", lambda *_, **__: trial)
    asked = Predictor(EstimateRequest(model="gpt2-nano", checkpoint_dir=tmp_path), KNOWN)
    if verdict == "rejected":
        with pytest.raises(NoSourceError, match="others used 97% of its GPU"):
            measuring.probe(asked, seconds=15)
        assert calibration.read(tmp_path) == []
        return
    measuring.probe(asked, seconds=15)
    (line,) = calibration.read(tmp_path)
    assert line["others"] == busy / 100
    assert ("the interval is wider" in capsys.readouterr().err) == (verdict == "wider")
