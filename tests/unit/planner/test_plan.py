"""What a plan decides before torch is loaded: parameters, batches, steps, checkpoints."""

from typing import Any

import pytest

from gpt2lab.config import derived
from gpt2lab.config.derived import BatchPlan, compiles, count_steps, plan_batches
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import BatchConfig, Config, LengthConfig, SystemConfig
from gpt2lab.config.settings import override, to_flat
from gpt2lab.errors import ConfigError
from gpt2lab.training.plan import make_plan
from tiny import resolved


@pytest.mark.parametrize(("total", "world"), [(96, 1), (96, 2), (480, 5)])
def test_the_batch_is_world_times_accumulation_times_micro_batch(total, world):
    batch = BatchConfig(total_batch_size=total, mini_batch_size=3)
    plan = plan_batches(batch, context_length=4, world_size=world)
    assert plan == BatchPlan(total // 4, 3, total // (4 * 3 * world), world, 4)
    assert plan.samples == plan.world_size * plan.accumulation * plan.micro_batch
    assert plan.tokens == total
    assert derived.mini_batch_sizes(12) == [1, 2, 3, 4, 6, 12]
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
    assert flat["warmup_steps"] == steps // 10
    assert start.attempt == 1
    assert list(tmp_path.iterdir()) == []
    # A run without a name is named by model and time.
    flags = [flag for flag in tiny_flags if not flag.startswith("--run_name")]
    start = resolved(flags)
    model, date, clock = start.run_dir.name.replace("_", "-").split("-")
    assert (model, len(date), len(clock)) == ("gpt2", 8, 6)
    assert (date + clock).isdigit()
