"""The planner: what must be true of any forecast, public runs, windows, and what its door prints and refuses."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as st

from gpt2lab import hardware
from gpt2lab.errors import ConfigError, GPT2LabError, NoSourceError
from gpt2lab.interval import Interval, total
from gpt2lab.planning import (
    calibration,
    measuring,
    planner,
    profiles,
    remaining,
    scoring,
    setting,
    timing,
)
from gpt2lab.planning.ask import Ask, job_of
from gpt2lab.planning.calibration import Kind
from gpt2lab.planning.deadline import Window, steps_that_fit, verdict
from gpt2lab.planning.estimate import Estimate, estimate
from gpt2lab.planning.events import EventCosts, event_costs
from gpt2lab.planning.here import Seen, here
from gpt2lab.planning.job import Job
from gpt2lab.planning.loss_prediction import effective_tokens, predicted_loss
from gpt2lab.planning.machine import GpuState, Machine, named
from gpt2lab.planning.report_json import KEYS
from gpt2lab.planning.timing import Measured, Rates, fit, work
from gpt2lab.presets import preset
from gpt2lab.settings import override
from tiny import TRAIN_SHARDS, write_shards

KNOWN = hardware.load(Path("/nonexistent"))
DOOR = Path(__file__).resolve().parents[1] / "scripts" / "estimate_time.py"
examples = rules(derandomize=True, max_examples=60, deadline=None)
NVLINK = ("A100", "H100", "H200", "B200")


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    hardware.load.cache_clear()


def job_for(*, world: int = 1, **flags: object) -> Job:
    ask = Ask(**flags)  # type: ignore[arg-type]
    return job_of(ask, profiles.find(None, KNOWN), world=world, is_cpu=False, native_bf16=True)


def on(gpu: str, *, gpus: int = 1, compiled: bool = True, **more: object) -> Machine:
    card = KNOWN.gpu(gpu)
    rates = timing.roofline(card, KNOWN, compiled=compiled)
    return named(card, KNOWN, gpus=gpus, rates=rates, **({"nodes": 1, "interconnect": None} | more))  # type: ignore[arg-type]


def foretell(gpu: str, *, gpus: int = 1, **flags: object) -> Estimate:
    return estimate(job_for(world=gpus, **flags), on(gpu, gpus=gpus), KNOWN)


# -- public runs ---------------------------------------------------------------------------------------------------

PUBLIC = {  # tokens a second and card; sources in docs/planner.md
    "llm.c 124M, 8 x H100": ("H100", "gpt2", 468e3, True),
    "modded-nanogpt baseline, torch 2.5, 8 x H100": ("H100", "gpt2", 462e3, True),
    "modded-nanogpt AdamW, torch 2.3, 8 x H100": ("H100", "gpt2", 332e3, True),
    "llm.c 1558M, 8 x H100": ("H100", "gpt2-xl", 48.5e3, True),
    "nanoGPT 124M, RTX 4090": ("RTX-4090", "gpt2", 106e3, True),
    "build-nanogpt 124M, A100-80": ("A100", "gpt2", 183e3, True),
    "llm.c 124M, 8 x A100-80": ("A100", "gpt2", 231e3, True),
    "build-nanogpt 124M, not compiled, 8 x A100-40": ("A100-40GB", "gpt2", 137e3, False),
}


def test_six_of_eight_public_runs_are_inside_the_interval() -> None:
    inside = []
    for gpu, model, measured, compiled in PUBLIC.values():
        amount = work(preset(model).model, micro_batch=32, accumulation=2)  # type: ignore[arg-type]
        rates = timing.roofline(KNOWN.gpu(gpu), KNOWN, compiled=compiled)
        rate = rates.interval(amount).inverse_of(32 * 2 * 1024)
        inside.append(rate.contains(measured))
    assert sum(inside) >= 6


# -- what must be true of any forecast -------------------------------------------------------------------------------


@examples
@given(
    gpu=st.sampled_from(["RTX-4090", *NVLINK]),
    model=st.sampled_from(["gpt2", "gpt2-medium", "gpt2-large"]),
    steps=st.integers(1, 10**6),
)
def test_parts_sum_to_the_total_and_steps_cost_in_proportion(
    gpu: str, model: str, steps: int
) -> None:
    found = foretell(gpu, model=model, steps=str(steps))
    parts = found.breakdown.values()
    assert found.seconds.value == pytest.approx(sum(part.value for part in parts))
    assert found.seconds.low <= found.seconds.value <= found.seconds.high
    double = foretell(gpu, model=model, steps=str(2 * steps))
    assert double.breakdown["train"].value == pytest.approx(2 * found.breakdown["train"].value)
    assert double.seconds.value > found.seconds.value
    need = found.memory
    assert need.needed == pytest.approx(need.tensors.tensors + need.overhead)
    if found.cost is not None:
        hours = found.seconds.value / 3600
        assert found.cost.usd.value == pytest.approx(found.cost.price_per_gpu_hour * hours)


@pytest.mark.parametrize("gpu", NVLINK)
@pytest.mark.parametrize("model", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_more_cards_are_never_slower_on_nvlink(gpu: str, model: str) -> None:
    times = [
        foretell(gpu, gpus=n, model=model, mini_batch_size=4, tokens="10B").step.value
        for n in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[-1] <= 8


@examples
@given(hours=st.floats(0.2, 400), gpu=st.sampled_from(["RTX-4090", "A100", "H100"]))
def test_a_run_fits_exactly_if_its_upper_bound_is_within_the_budget(hours: float, gpu: str) -> None:
    window = Window(3600 * hours, 300.0)
    job, where = job_for(tokens="10B"), on(gpu)
    found = estimate(job, where, KNOWN)
    assert (verdict(found, window) == "fits") == (found.seconds.high <= window.budget)
    steps = steps_that_fit(job, window, lambda other: estimate(other, where, KNOWN))
    if steps:
        assert estimate(job.with_steps(steps), where, KNOWN).seconds.high <= window.budget
        assert estimate(job.with_steps(steps + 1), where, KNOWN).seconds.high > window.budget


def test_scaling_is_that_of_the_published_model() -> None:
    """Nearly linear on NVLink, visibly worse over PCIe, useless over 10 Gb/s Ethernet."""

    def efficiency(gpu: str, gpus: int, **more: object) -> float:
        def step(n: int, **how: object) -> float:
            return estimate(
                job_for(world=n, tokens="10B", mini_batch_size=16), on(gpu, gpus=n, **how), KNOWN
            ).step.value

        return step(1) / (gpus * step(gpus, **more))

    assert efficiency("H200", 8) > 0.97
    assert 0.88 < efficiency("RTX-4090", 8) < 0.97
    assert efficiency("H100", 16, nodes=2, interconnect="ib400") > 0.9
    assert efficiency("H100", 16, nodes=2, interconnect="eth10") < 0.2


def test_intervals_add_in_quadrature_and_stay_positive() -> None:
    both = total([Interval(10, 7, 14), Interval(10, 6, 13)])
    assert (both.value, both.low, both.high) == (20, 15, 25)
    assert total([Interval(1, 0, 3), Interval(1, 0, 3)]).low >= 0


# -- learning from runs --------------------------------------------------------------------------------------------


def test_rates_are_recovered_from_runs_of_different_shapes() -> None:
    truth = Rates((2e-12, 6e-12, 3e-9, 5e-10, 2e-9, 4e-4), np.zeros((6, 6)), "truth")
    shapes = [
        (2, 128, 4096, 64),
        (6, 256, 1024, 128),
        (3, 64, 50304, 256),
        (8, 192, 2048, 64),
        (1, 512, 8192, 32),
        (4, 384, 512, 512),
        (12, 96, 1024, 128),
        (2, 640, 1024, 64),
    ]
    base = preset("gpt2").model
    models = [
        dataclasses.replace(base, n_layer=L, n_embd=C, n_head=1, vocab_size=V, context_length=T)
        for L, C, V, T in shapes
    ]
    seen = [Measured(w := work(m, micro_batch=4, accumulation=1), truth.seconds(w)) for m in models]
    prior = timing.processor(1e11, KNOWN, bf16=False)
    rates = fit(prior, seen[:-1], spread=1.0)
    assert rates.seconds(seen[-1].work) == pytest.approx(seen[-1].seconds, rel=0.1)
    assert rates.sigma(seen[-1].work) < prior.sigma(seen[-1].work)
    one = fit(prior, seen[:1], spread=1.0)
    assert one.seconds(seen[0].work) == pytest.approx(seen[0].seconds, rel=0.05)


def record(**more: object) -> dict[str, object]:
    model = preset("gpt2-nano").model
    return {
        **{"device": "x", "world": 1, "threads": 2, "dtype": "fp32", "compile": False},
        **{"n_layer": model.n_layer, "n_head": model.n_head, "n_embd": model.n_embd},
        **{"context_length": model.context_length, "vocab_size": model.vocab_size},
        **{
            "micro_batch": 8,
            "accumulation": 4,
            "step_seconds": 0.5,
            "others": 0.0,
            "ratios": {"eval": 0.3},
        },
    } | more


def test_only_runs_of_the_same_kind_of_machine_count_and_busy_ones_only_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / calibration.FILE
    lines = [record(), record(device="y", step_seconds=9.0), record(others=0.8, step_seconds=2.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn": ')
    records = calibration.read(tmp_path)
    assert len(records) == 3
    prior = timing.processor(1e11, KNOWN, bf16=False)
    kind = Kind("x", 1, 2, "fp32", False)
    rates, ratios = calibration.calibrate(prior, records, kind, spread=1.0)
    amount = work(preset("gpt2-nano").model, micro_batch=8, accumulation=4)
    assert rates.seconds(amount) == pytest.approx(0.5, rel=0.05)
    assert ratios == {"eval": 0.3}
    busy, _ = calibration.calibrate(prior, [records[2]], kind, spread=1.0)
    assert busy.sigma(amount) > rates.sigma(amount)
    other = Kind("z", 1, 2, "fp32", False)
    assert calibration.calibrate(prior, records, other, spread=1.0)[0] is prior


def test_recomputing_costs_time_and_is_learned_as_what_it_was() -> None:
    model = preset("gpt2").model
    plain, selective, block = (
        on("H100").rates.seconds(work(model, micro_batch=8, accumulation=2, recompute=mode))
        for mode in ("none", "selective", "block")
    )
    assert plain < selective < block < 4 / 3 * plain, "the head and the update are done once"
    prior = timing.processor(1e11, KNOWN, bf16=False)
    kind = Kind("x", 1, 2, "fp32", False)
    learned, _ = calibration.calibrate(prior, [record(recompute="block")], kind, spread=1.0)
    amount = work(preset("gpt2-nano").model, micro_batch=8, accumulation=4, recompute="block")
    assert learned.seconds(amount) == pytest.approx(0.5, rel=0.05)


def test_the_cost_of_hellaswag_is_learned_from_a_run() -> None:
    """An item in one text that costs as much as training on 100 tokens, foretold for two texts and for one."""
    config = preset("gpt2-nano")
    steps = {
        "event": "step",
        "attempt": 1,
        "time": 1.0,
        "step_seconds": 0.5,
        "peak_memory_bytes": 1,
    }
    events = [steps | {"step": n, "elapsed_seconds": n / 2} for n in range(1, 21)]
    token = 0.5 / config.batch.total_batch_size
    events.append({"event": "hellaswag", "attempt": 1, "n": 30, "seconds": 30 * 2 * 100 * token})
    environment = {"device": "x", "world_size": 1, "threads": 2, "dtype": "fp32"}
    line = calibration.record_of(
        events,
        environment | {"compile": "off", "mini_batch_size": config.batch.mini_batch_size},
        vars(config.model) | vars(config.batch) | {"hellaswag_metrics": "all"},
        others=0.0,
        source="run",
    )
    assert line is not None
    assert line["ratios"]["hellaswag"] == pytest.approx(100)
    for metrics, texts in (("all", 2), ("harness", 1)):
        asked = override(config, {"hellaswag_metrics": metrics, "hellaswag_limit": 30})
        job = Job(asked, max_steps=10, world=1, dtype="bf16", compiled=False)
        a_card = on("H100", compiled=False)
        costs = event_costs(job, a_card, KNOWN, ratios=line["ratios"])
        one = work(config.model, micro_batch=job.micro_batch, accumulation=1)
        training = a_card.rates.seconds((*one[:4], 0.0, one[5])) / job.micro_batch
        expected = 30 * texts * 100 * training / config.model.context_length
        assert costs.seconds["hellaswag"] == pytest.approx(expected)


# -- hardware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GB200", None),
    ],
)
def test_a_device_name_means_its_card_or_none(device: str, name: str | None) -> None:
    found = KNOWN.recognise(device)
    assert (found.name if found else None) == name


def test_every_number_has_a_source_with_a_date() -> None:
    document = json.loads(hardware.SHIPPED.read_text())
    assert all(source["date"] for source in document["sources"].values())
    numbers = [
        value
        for card in document["gpus"].values()
        for value in card.values()
        if isinstance(value, list)
        and len(value) == 2
        and isinstance(value[1], str)
        and not isinstance(value[0], list | str)
    ]
    numbers += list(document["constants"].values())
    assert len(numbers) > 100
    assert {source for _, source in numbers} <= set(document["sources"])


def test_a_users_file_merges_over_the_shipped_one(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(
        json.dumps(
            {
                "sources": {"me": {"title": "my bill", "date": "2026-11-01"}},
                "gpus": {
                    "H100": {"usd_per_hour": [1.5, "me"]},
                    "X9": {
                        "words": [["x9"]],
                        "bf16_tflops": [100, "me"],
                        "bandwidth_gbs": [900, "me"],
                    },
                },
                "profiles": {
                    "night": {
                        "about": "",
                        "context_length": 256,
                        "memory_target": 0.5,
                        "tokens_per_parameter": 5,
                        "eval_interval": 4,
                    }
                },
            }
        )
    )
    merged = hardware.load(own)
    assert (merged.gpu("h100").usd_per_hour, merged.gpu("h100").price_date) == (1.5, "2026-11-01")
    assert merged.gpu("h100").peak_flops == 989e12
    assert merged.gpu("x9").peak_flops == 100e12
    assert profiles.find("night", merged).context_length == 256
    own.write_text('{"gpus": {"X9": {"words": [["x9"]], "bf16_tflops": [100, "nobody"]}}}')
    hardware.load.cache_clear()
    with pytest.raises(ConfigError, match=r"own\.json"):
        hardware.load(own)


# -- loss ----------------------------------------------------------------------------------------------------------


def test_loss_is_the_published_law_with_its_offset() -> None:
    found = predicted_loss(124_475_904, 10.26e9)
    assert found is not None
    assert found.contains(3.272)  # llm.c's log
    assert predicted_loss(7_000_000, 1e9) is None
    assert effective_tokens(1e9, 2e9) == 1e9
    assert 1e9 < effective_tokens(4e9, 1e9) < 4e9


# -- the door ------------------------------------------------------------------------------------------------------


def ask(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DOOR), f"--checkpoint_dir={tmp_path / 'runs'}", *argv],
        capture_output=True,
        text=True,
        timeout=60,
    )


def _processor_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_without_run_or_gpu_the_answer_is_wide_instant_and_without_torch(tmp_path: Path) -> None:
    before = _processor_seconds_of_children()
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", str(DOOR), f"--checkpoint_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    spent = _processor_seconds_of_children() - before
    assert spent < 1.5  # about half, and others on the machine make it slower
    assert answer.returncode == 0, answer.stderr[-500:]
    assert "| torch" not in answer.stderr
    if "CPU" in answer.stdout:
        assert "UNCALIBRATED" in answer.stdout
        assert "--measure" in answer.stdout


@pytest.mark.parametrize(
    "flags",
    [
        ["--gpu=H100", "--gpus=8", "--tokens=1B"],
        ["--gpu=RTX-4090", "--steps=1000", "--deadline=12h"],
        ["--gpu=H100", "--compare=models", "--deadline=12h"],
        ["--gpu=H100", "--compare=gpus"],
        ["--gpu=H100", "--compare=profiles", "--deadline=2d"],
        [
            "--gpu=H100",
            "--num_samples=20000",
            "--avg_tokens_per_sample=500",
            "--total_batch_size=65536",
        ],
        ["--accuracy"],
        [],
    ],
)
def test_json_is_one_object_with_every_key_in_every_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    from gpt2lab.flags import run_tyro

    (tmp_path / "runs").mkdir()
    flags = [*flags, f"--checkpoint_dir={tmp_path / 'runs'}", "--json"]
    assert planner.answer(run_tyro(Ask, flags)) in (0, 3)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert set(KEYS) <= set(json.loads(out))


def test_the_report_file_holds_the_keys_of_the_window_planner(tmp_path: Path) -> None:
    report = tmp_path / "optimization_report.json"
    flags = ["--gpu=H100", "--gpus=4", "--tokens=2B", "--deadline=12h", f"--report={report}"]
    answer = ask(tmp_path, *flags)
    assert (answer.returncode, answer.stderr) == (0, "")
    found = json.loads(report.read_text())
    assert found["schema"] == "gpt2-estimate/1"
    assert found["max_training_hours"] == 12.0
    assert found["estimate"]["verdict"] == "fits"
    assert found["estimate"]["fits_in_window"] is True
    assert {"batch_size", "gradient_accumulation_steps", "max_length"} <= set(found["profile"])
    assert found["model"]["parameters"] == 124_475_904
    assert sum(found["breakdown"].values()) == pytest.approx(
        3600 * found["estimate"]["estimated_hours"]
    )
    assert found["actual"] is None


REFUSALS = {
    "unknown gpu": (["--gpu=H1000"], 2, "H100"),
    "negative tokens": (["--tokens=-5"], 2, "--tokens"),
    "tokens in words": (["--tokens=many"], 2, "--tokens"),
    "absurd tokens": (["--tokens=1e30"], 2, "--tokens"),
    "absurd layers": (["--n_layer=99999999999"], 2, "n_layer"),
    "no layers": (["--n_layer=0"], 2, "n_layer"),
    "two lengths": (["--tokens=1B", "--steps=5"], 2, "--steps"),
    "less than a step": (["--gpu=H100", "--tokens=1000"], 2, "less than one step"),
    "epochs of nothing": (["--epochs=2"], 2, "--data_dir"),
    "half a sample size": (["--num_samples=5"], 2, "--avg_tokens_per_sample"),
    "deadline in the past": (["--gpu=H100", "--deadline=2020-01-01 00:00"], 2, "past"),
    "deadline in words": (["--gpu=H100", "--deadline=soon"], 2, "--deadline"),
    "all margin": (["--gpu=H100", "--deadline=20m"], 2, "--margin"),
    "unknown profile": (["--gpu=H100", "--profile=quick"], 2, "profile"),
    "unknown link": (["--gpu=H100", "--gpus=16", "--nodes=2", "--interconnect=wifi"], 2, "ib400"),
    "nodes without link": (["--gpu=H100", "--gpus=16", "--nodes=2"], 2, "--interconnect"),
    "uneven nodes": (["--gpu=H100", "--gpus=8", "--nodes=3"], 2, "evenly"),
    "batch does not divide": (["--gpu=H100", "--gpus=7"], 2, "total_batch_size"),
    "no bf16": (["--gpu=T4"], 2, "T4"),
    "run of another name": (["--run_name=nobody"], 2, "nobody"),
    "measure elsewhere": (["--measure", "--gpu=H100"], 2, "--measure"),
    "free price": (["--gpu=H100", "--price=0"], 2, "--price"),
    "report nowhere": (["--gpu=H100", "--report=/nonexistent/x.json"], 2, "--report"),
    "fits no window": (["--gpu=RTX-4090", "--tokens=100B", "--deadline=1h"], 3, ""),
    "fits no memory": (["--gpu=RTX-4090", "--model=gpt2-xl"], 3, ""),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from gpt2lab.door import run
    from gpt2lab.flags import run_tyro

    flags, code, word = REFUSALS[what]
    flags = [*flags, f"--checkpoint_dir={tmp_path / 'runs'}"]
    monkeypatch.setattr(sys, "argv", ["estimate_time.py", *flags])
    assert run(lambda argv: planner.answer(run_tyro(Ask, argv))) == code
    out, err = capsys.readouterr()
    if code == 2:
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert word in err
    else:
        assert err == ""
        assert "NOT FIT" in out
        assert "to make it fit" in out or "GiB" in out
    assert not (tmp_path / "runs").exists()


def test_settings_that_make_no_sense_together_are_named(tmp_path: Path) -> None:
    answer = ask(tmp_path, "--gpu=H100", "--steps=100", "--warmup_steps=715")
    assert answer.returncode == 0
    assert "warm-up of 715 steps in a run of 100" in answer.stdout
    assert "eval_freq 250 is longer than the run" in answer.stdout


def test_the_length_of_a_run_in_epochs_is_counted_in_the_data(tmp_path: Path) -> None:
    data = write_shards(tmp_path / "d", train=TRAIN_SHARDS, val=(650,))
    flags = ["--gpu=H100", "--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16"]
    flags += ["--vocab_size=256", "--total_batch_size=128", "--mini_batch_size=2", "--epochs=3"]
    answer = ask(tmp_path, *flags, f"--data_dir={data}", "--json")
    found = json.loads(answer.stdout)
    windows = sum((size - 1) // 16 for size in TRAIN_SHARDS)
    assert found["estimate"]["total_steps"] == int(3 * windows * 16) // 128
    assert found["dataset_info"]["epochs"] == pytest.approx(3, abs=0.1)


# -- a run's log ---------------------------------------------------------------------------------------------------


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    """Return the folder of a run that stopped half-way, with an estimate."""
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    from gpt2lab.config import Config
    from gpt2lab.settings import to_flat

    (run_dir / "config.json").write_text(json.dumps(to_flat(Config())))
    lines: list[dict[str, object]] = [
        {
            "event": "begin",
            "step": 0,
            "max_steps": 1000,
            "tokens_per_step": 524_288,
            "world_size": 1,
        }
    ]
    for step in range(1, 501):
        lines.append(
            {"event": "step", "step": step, "step_seconds": 2.0, "elapsed_seconds": 2.0 * step}
        )
        if step % 250 == 0:
            lines.append({"event": "eval", "step": step, "seconds": 10.0, "val_tokens": 1})
    text = "".join(json.dumps({"time": 1.7e9, "attempt": 1, **line}) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)
    return run_dir


def test_the_newest_run_is_projected_with_its_events_and_milestones(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = remaining.estimate_remaining(a_run)
    assert left.seconds is not None
    assert left.seconds.value == pytest.approx(500 * 2.0 + 2 * 10.0)
    assert left.seconds.contains(1020)
    assert [step for step, _ in left.milestones] == [750, 1000]
    assert planner.answer(Ask(checkpoint_dir=a_run.parent)) == 0
    shown = capsys.readouterr().out
    assert "500 of 1,000 steps" in shown
    assert "75%" in shown
    planner.answer(Ask(checkpoint_dir=a_run.parent, json=True))
    assert set(KEYS) <= set(json.loads(capsys.readouterr().out))


def test_logs_that_cannot_be_right_are_refused_in_one_line(a_run: Path) -> None:
    metrics = a_run / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text + '{"event": "step", "st')  # torn: the writer was killed
    assert remaining.estimate_remaining(a_run).step == 500
    metrics.write_text("")
    with pytest.raises(ConfigError, match="not begun"):
        remaining.estimate_remaining(a_run)
    metrics.write_text(text.replace("524288", "1024"))
    with pytest.raises(ConfigError, match="another config"):
        remaining.estimate_remaining(a_run)
    metrics.write_text("no json\n" + text)
    with pytest.raises(GPT2LabError, match="line 1"):
        remaining.estimate_remaining(a_run)


def test_score_is_kept_of_what_was_foretold(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foretold = {"estimated_hours": 0.3, "low_hours": 0.2, "high_hours": 0.4}
    document = {"estimate": foretold, "throughput": {"source": "calibrated"}, "memory": None}
    (a_run / scoring.FILE).write_text(json.dumps(document))
    text = (
        (a_run / "metrics.jsonl")
        .read_text()
        .replace('"step_seconds"', '"peak_memory_bytes": 5, "step_seconds"')
    )
    (a_run / "metrics.jsonl").write_text(
        text.replace('"val_tokens"', '"val_loss": 3.0, "val_tokens"')
    )
    actual = scoring.complete(a_run)
    assert actual is not None
    assert actual["hours"] == pytest.approx((1000 + 10) / 3600, rel=0.01)
    assert actual["time_accuracy"] == pytest.approx(100 * 0.3 * 3600 / 1010, rel=0.01)
    assert actual["inside_interval"] is True
    assert scoring.print_history(a_run.parent, as_json=False) == 0
    assert "100% inside" in capsys.readouterr().out


def test_event_costs_know_what_was_measured() -> None:
    costs = EventCosts({"eval": 10.0, "sample": 1.0}, frozenset({"eval"}))
    assert costs.interval("eval", 3).value == 30.0
    assert costs.interval("eval", 1).high / 10 < costs.interval("sample", 1).high


def test_an_unknown_gpu_is_measured_never_guessed() -> None:
    card = GpuState(0, "NVIDIA Mystery 9", 2**35, 2**35, 0.0, "1", "9.0", None, None, None)
    with pytest.raises(NoSourceError, match="--measure"):
        here(Seen((card,)), KNOWN, [], processes=1, dtype="bf16", compiled=True)
    seen = record(device="NVIDIA Mystery 9", dtype="bf16", compile=True, threads=1)
    found, _ = here(Seen((card,)), KNOWN, [seen], processes=1, dtype="bf16", compiled=True)
    amount = work(preset("gpt2-nano").model, micro_batch=8, accumulation=4)
    assert found.rates.seconds(amount) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(("busy", "verdict"), [(97.0, "refused"), (30.0, "wider"), (3.0, "good")])
def test_a_gpu_that_others_use_is_no_measure(
    busy: float,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    card = GpuState(0, "NVIDIA H200", 2**37, 2**37, busy, "1", "9.0", None, None, None)
    monkeypatch.setattr(setting, "look", lambda: Seen((card,)))
    step = {"event": "step", "attempt": 1, "time": 1.0, "step_seconds": 0.5, "peak_memory_bytes": 1}
    events = [step | {"step": n, "elapsed_seconds": n / 2} for n in range(1, 9)]
    config = preset("gpt2-nano")
    environment = {"device": card.name, "world_size": 1, "threads": 2, "dtype": "bf16"}
    environment |= {"compile": "on", "mini_batch_size": config.batch.mini_batch_size}
    trial = measuring.Trial(
        events, environment, vars(config.model) | vars(config.batch), 0.01, out_of_memory=False
    )
    monkeypatch.setattr(measuring, "run_trial", lambda *_, **__: trial)
    asked = setting.Setting(Ask(model="gpt2-nano", checkpoint_dir=tmp_path), KNOWN)
    if verdict == "refused":
        with pytest.raises(NoSourceError, match="others used 97% of its GPU"):
            measuring.probe(asked, profiles.find(None, KNOWN), seconds=15)
        assert calibration.read(tmp_path) == []
        return
    measuring.probe(asked, profiles.find(None, KNOWN), seconds=15)
    (line,) = calibration.read(tmp_path)
    assert line["others"] == busy / 100
    assert ("the interval is wider" in capsys.readouterr().err) == (verdict == "wider")


@pytest.mark.parametrize(
    ("unique", "says"),
    [
        (
            100_000_000,
            "even 4 passes are fewer than the 10 of the leanest profile; take a model of at most 40,000,000",
        ),
        (400_000_000, "--profile fast, about 2.5 passes"),
        (500_000_000, "--profile balanced, about 4 passes"),
        (10_000_000_000, "--profile quality, about 0.4 passes"),
    ],
)
def test_the_size_of_the_data_says_which_profile_it_has_text_for(unique: int, says: str) -> None:
    known = profiles.profiles(hardware.load()).values()
    assert says in profiles.advise(unique, parameters=100_000_000, known=known)
