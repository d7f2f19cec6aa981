"""`--preset 8xh100`: cuts the same step for other cards, and never changes what is learned."""

import json
from pathlib import Path

import pytest

from gpt2lab.config.settings import to_flat
from gpt2lab.errors import ConfigError
from gpt2lab.planner import auto, hardware
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import DetectedHardware, GpuState
from gpt2lab.training.resolve import resolve
from gpt2lab.training.start import Start
from launch import steps
from tiny import parse, pretrain, resolved, train, write_shards

WORLDS = {"1x4090": 1, "1xL40S": 1, "1x5090": 1, "1xa100": 1, "4xh200": 4, "8xh100": 8, "8xb200": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return shards with one step of half a million tokens."""
    return write_shards(tmp_path_factory.mktemp("data") / "d", train=(600_000,), val=(4000,))


def settled(data: Path, *flags: str, world: int = 1) -> Start:
    return resolved([f"--data_dir={data}", *flags], world_size=world)


def job_of(start: Start) -> Job:
    return Job.of_run(start.config, start.plan, train_tokens=1, dtype="bf16", compiled=True)


def show_card(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Let the machine have one card of this name and 80 GB, or none."""
    card = () if name is None else (GpuState(0, name, 8e10, 8e10, 0.0, "1", "8.0", None, None),)
    monkeypatch.setattr(auto, "detect_hardware", lambda **_: DetectedHardware(card))


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("model", ["gpt2", "gpt2-medium"])
def test_only_the_cut_changes_and_it_fits_the_card(data, capsys, name, model):
    world = WORLDS[name]
    request = parse([f"--data_dir={data}", f"--model={model}", "--run_name=r"])
    plain = resolve(request, world_size=world, set_aside=False)
    start = settled(data, f"--model={model}", "--run_name=r", f"--preset={name}", world=world)
    before, after = to_flat(plain.config), to_flat(start.config)
    cut = {"mini_batch_size", "activation_checkpointing"}
    assert {key for key in after if after[key] != before[key]} <= cut
    assert after["activation_checkpointing"] == "none", "these leave room on every card"
    assert start.plan.batch.tokens == plain.plan.batch.tokens == 524_288
    said = capsys.readouterr().err
    assert f"--preset {name}: mini_batch_size {start.plan.batch.micro_batch}," in said
    assert "tokens/s" in said
    card = hardware.load().gpu(name.partition("x")[2])
    job = job_of(start)
    need = auto._on_card(job, card, hardware.load()).memory
    assert need.fits
    largest = need.largest_micro_batch
    assert start.plan.batch.micro_batch == min(largest, auto.PRESET_MAX_BATCH)


def test_blocks_compute_twice_where_the_card_holds_too_little_otherwise(data):
    large = ("--model=gpt2-large", "--n_layer=42", "--preset=1x4090")
    start = settled(data, *large)
    job = job_of(start)
    assert job.recompute != "none"
    card, known = hardware.load().gpu("4090"), hardware.load()
    assert auto._on_card(job, card, known).memory.fits
    plain = auto._on_card(job.with_settings(activation_checkpointing="none"), card, known)
    assert (plain.memory.largest_micro_batch or 0) < job.micro_batch
    typed = settled(data, *large, "--activation_checkpointing=none")
    assert typed.config.system.activation_checkpointing == "none"


def test_a_typed_mini_batch_wins_and_is_judged(data, capsys):
    start = settled(data, "--preset=1x4090", "--mini_batch_size=64")
    assert start.plan.batch.micro_batch == 64
    said = capsys.readouterr().err
    assert "warning: mini_batch_size 64 does not fit RTX-4090; the largest that does is 32" in said
    with pytest.raises(ConfigError, match="not a multiple"):
        settled(data, "--preset=1x4090", "--mini_batch_size=7")
    # A batch that the usual cut does not divide is cut by the preset.
    start = settled(data, "--preset=1xa100", "--total_batch_size=24576")
    assert (start.plan.batch.micro_batch, start.plan.batch.accumulation) == (24, 1)


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        *(("--preset=8xh100", 1), ("--preset=1xh200", 2), ("--preset=3xh100", 1)),
        *(("--preset=1x4090 --model=gpt2-xl", 1), ("--preset=h100", 1), ("--preset=auto", 1)),
    ],
)
def test_a_preset_that_cannot_be_is_one_line(data, flags, world, wording):
    with pytest.raises(ConfigError, check=wording):
        settled(data, *flags.split(), world=world)


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (None, "this machine shows no GPU"),
        ("NVIDIA A100-SXM4-40GB", "is for A100, and this machine has NVIDIA A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_another_machine_than_the_presets_is_said(data, monkeypatch, capsys, here, says):
    show_card(monkeypatch, here)
    settled(data, "--preset=1xa100")
    said = capsys.readouterr().err
    assert (says in said) if says else ("warning" not in said)


def test_auto_is_the_card_of_this_machine(data, monkeypatch, capsys):
    show_card(monkeypatch, "NVIDIA L40S")
    found = settled(data, "--preset=auto")
    assert found.config.batch == settled(data, "--preset=1xL40S").config.batch
    assert "warning" not in capsys.readouterr().err


def test_a_run_with_a_preset_trains_and_resumes_on_another(tiny_flags, tmp_path, capsys):
    flags = [flag for flag in tiny_flags if "mini_batch_size" not in flag]
    pretrain(parse([*flags, "--max_steps=2", "--stop_after_steps=1", "--mini_batch_size=2"]))
    train([*flags, "--resume=latest", "--preset=1x4090"])
    run_dir = tmp_path / "runs" / "tiny"
    assert set(steps(run_dir)) == {1, 2}
    assert json.loads((run_dir / "config.json").read_text())["mini_batch_size"] == 8
    assert "--preset 1x4090: mini_batch_size 8," in capsys.readouterr().err
