"""What a plan decides before torch is loaded: parameters, batches, steps, checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpt2lab.config import derived
from gpt2lab.config.derived import BatchPlan, compiles, count_steps, plan_batches
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import BatchConfig, Config, LengthConfig, SystemConfig
from gpt2lab.config.settings import override, to_flat
from gpt2lab.errors import ConfigError
from gpt2lab.planner import auto, hardware
from gpt2lab.planner.auto import choose_first_run
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import DetectedHardware, GpuState
from gpt2lab.training.plan import make_plan
from gpt2lab.training.resolve import resolve
from gpt2lab.training.start import Start
from launch import steps
from tiny import parse, pretrain, resolved, train, write_shards


@pytest.mark.parametrize(("total", "world"), [(96, 1), (96, 2), (480, 5)])
def test_the_batch_is_world_times_accumulation_times_micro_batch(total, world):
    batch = BatchConfig(total_batch_size=total, mini_batch_size=3)
    plan = plan_batches(batch, context_length=4, world_size=world)
    assert plan == BatchPlan(total // 4, 3, total // (4 * 3 * world), world, 4)
    assert plan.samples == plan.world_size * plan.accumulation * plan.micro_batch
    assert (plan.tokens, derived.mini_batch_sizes(12)) == (total, [1, 2, 3, 4, 6, 12])
    assert derived.mini_batch_sizes(12, at_most=5) == [1, 2, 3, 4]
    assert [derived.fitting_rows(256), derived.fitting_rows(257)] == [256, 384]


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    def message(total: int, world: int) -> str:
        batch = BatchConfig(total_batch_size=total, mini_batch_size=3)
        with pytest.raises(ConfigError) as error:
            plan_batches(batch, context_length=4, world_size=world)
        return str(error.value)

    assert "nearest: 96 or 108 " in message(100, 1)
    assert "nearest: 96 or 120 " in message(100, 2)
    assert "nearest: 120 " in message(100, 10)  # 0 is no batch
    assert "total_batch_size 100 is not a multiple of" in message(100, 1)
    for total, world in [(96, 1), (108, 1), (96, 2), (120, 2), (120, 10)]:
        batch = BatchConfig(total_batch_size=total, mini_batch_size=3)
        assert plan_batches(batch, context_length=4, world_size=world).tokens == total
    assert derived.fit_mini_batch(batch, context_length=4, world_size=7) == (batch, None)


LENGTHS_OF_RUNS: list[tuple[dict[str, Any], int | str]] = [
    *(({"max_steps": 7}, 7), ({"max_tokens": 640}, 10), ({"max_tokens": 703}, 10)),
    ({"max_tokens": 704}, 11),
    ({"num_epochs": 1.0}, 6),  # 25 windows in steps of 4
    *(({"num_epochs": 2.0}, 12), ({"num_epochs": 0.5}, 3), ({"num_epochs": 0.16}, 1), ({}, 6)),
    *(({"max_tokens": 63}, "max_tokens 63"), ({"num_epochs": 0.15}, "0.15")),  # no step
]


@pytest.mark.parametrize(("length", "steps"), LENGTHS_OF_RUNS)
def test_steps_tokens_and_epochs_become_whole_steps_and_at_least_one(length, steps):
    what = {"context_length": 16, "windows_per_epoch": 25}
    asked = (LengthConfig(**length), BatchConfig(total_batch_size=64))
    if isinstance(steps, int):
        assert count_steps(*asked, **what) == steps
        return
    with pytest.raises(ConfigError, match=f"{steps}.* less than one step of 64 tokens"):
        count_steps(*asked, **what)


def test_a_plan_adds_up():
    """A CPU compiles from 200 steps on; an evaluation that is the best so far saves, and is kept as a rolling one."""
    assert not compiles(SystemConfig(), on_gpu=False, max_steps=199)
    assert compiles(SystemConfig(), on_gpu=False, max_steps=200)
    config = override(Config(), {"total_batch_size": 64, "mini_batch_size": 2, "num_epochs": 2.0})
    config = override(config, {"context_length": 16, "checkpoint_freq": 5, "keep_checkpoints": 3})
    plan = make_plan(config, world_size=2, windows_per_epoch=25)
    assert (plan.max_steps, plan.tokens, plan.epochs) == (12, 12 * 64, 12 * 4 / 25)
    assert plan.batch.accumulation == 1
    assert plan.checkpoint_bytes == 3 * 4 * plan.parameters  # weights and two moments, fp32
    assert plan.disk_bytes == plan.retained_checkpoints * plan.checkpoint_bytes
    # Rolling, one whole epoch, best and the one before, the one being written.
    assert plan.retained_checkpoints == 3 + 1 + 2 + 1
    config = override(Config(), {"max_steps": 60, "eval_freq": 4, "checkpoint_freq": 0})
    plan = make_plan(config, world_size=1, windows_per_epoch=10**6)
    assert plan.retained_checkpoints == config.checkpoint.keep_checkpoints + 2 + 1


@pytest.mark.parametrize(
    ("wanted", "epochs", "kept"), [("auto", 4, 4), ("auto", 5, 0), ("on", 5, 5), ("off", 1, 0)]
)
def test_the_ends_of_epochs_are_kept_unless_they_are_many(wanted, epochs, kept):
    config = override(preset("gpt2-nano"), {"num_epochs": epochs, "epoch_checkpoints": wanted})
    plan = make_plan(config, world_size=1, windows_per_epoch=32 * 100)
    assert plan.keeps_epochs is (kept > 0)
    assert plan.retained_checkpoints == min(epochs, 3) + 2 + 1 + kept


def test_what_was_left_open_is_decided_at_the_start_and_nothing_is_written(tiny_flags, tmp_path):
    assert resolved([*tiny_flags, "--max_steps=9", "--warmup_steps=9"]).plan.max_steps == 9
    start = resolved([*tiny_flags, "--max_lr=0.01"])
    flat = to_flat(start.config)
    steps = sum((size - 1) // 16 for size in (1003, 777, 1290)) // 8
    assert start.plan.max_steps == steps
    assert (flat["num_epochs"], flat["max_steps"], flat["max_tokens"]) == (1.0, None, None)
    assert flat["min_lr"] == pytest.approx(0.001)
    assert (flat["warmup_steps"], start.attempt) == (steps // 10, 1)
    assert list(tmp_path.iterdir()) == []
    # A run without a name is named by model and time.
    flags = [flag for flag in tiny_flags if not flag.startswith("--run_name")]
    start = resolved(flags)
    model, date, clock = start.run_dir.name.replace("_", "-").split("-")
    assert (model, len(date), len(clock)) == ("gpt2", 8, 6)
    assert (date + clock).isdigit()


# The command for a first run on new text: the preset and the length that suit its size and the machine.
LAPTOP = {"gpt2-nano": 3e7, "gpt2-micro": 1.4e7, "gpt2-mini": 3.4e6, "gpt2": 3e5}
CARD = dict.fromkeys(LAPTOP, 2e9)  # tokens in half an hour
ALL = {"num_epochs": 3}
SMALL_STEPS = {"total_batch_size": 512, "mini_batch_size": 4}
TABLE = [  # text, its training tokens and those of its shortest shard, machine, what fits
    ("20 kB", 5_798, 250, LAPTOP, "gpt2-nano", ALL | SMALL_STEPS),
    ("20 kB in bytes", 19_001, 1_000, CARD, "gpt2-nano", ALL | SMALL_STEPS),
    ("1 MB", 324_084, 13_942, LAPTOP, "gpt2-micro", ALL),
    ("1 MB in bytes", 1_059_626, 55_769, CARD, "gpt2-micro", ALL),
    ("30 MB", 14_290_485, 386_965, LAPTOP, "gpt2-micro", {"max_tokens": "14M"}),
    ("30 MB", 14_290_485, 386_965, CARD, "gpt2-mini", ALL),
    ("1 GB", 285_000_000, 15_000_000, LAPTOP, "gpt2-micro", {"max_tokens": "14M"}),
    ("1 GB", 285_000_000, 15_000_000, CARD, "gpt2", ALL),
    ("100 GB", 10**10, 10**8, CARD, "gpt2", {"max_tokens": "2B"}),
    ("1 GB, a shard of few tokens", 285_000_000, 900, CARD, "gpt2-mini", ALL),
    ("no window", 2_000, 128, LAPTOP, None, {}),
    ("no step", 298, 200, LAPTOP, None, {}),
]


@pytest.mark.parametrize(
    ("tokens", "shortest", "machine", "model", "flags"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_preset_and_length_suit_the_text_and_the_machine(tokens, shortest, machine, model, flags):
    """Without a window or a step there is no run."""
    found = choose_first_run(tokens, shortest, affordable=machine.__getitem__)
    assert found == ({"model": model, **flags} if model else {})


# `--preset 8xh100`: cuts the same step for other cards, and never changes what is learned.
WORLDS = {"1x4090": 1, "1xL40S": 1, "1x5090": 1, "1xa100": 1, "4xh200": 4, "8xh100": 8, "8xb200": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return shards with one step of half a million tokens."""
    return write_shards(tmp_path_factory.mktemp("data") / "d", train=(600_000,), val=(4000,))


def settled(data: Path, *flags: str, world: int = 1) -> Start:
    return resolved([f"--data_dir={data}", *flags], world_size=world)


def job_of(start: Start) -> Job:
    return Job(start.config, 1, start.plan.batch.world_size, dtype="bf16", compiled=True)


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
    said = capsys.readouterr().err
    assert "--preset 1x4090: mini_batch_size 8," in said
    assert "tokens/s" not in said, "no rate of fp32 is known"
