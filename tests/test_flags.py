"""The command line: what every flag is, which value wins, and what is refused in one line.

`python tests/test_flags.py` rewrites tests/golden/flags.txt.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # for `python tests/...`

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2lab import paths
from gpt2lab.config import BatchConfig, Config, LengthConfig, ModelConfig, fixed
from gpt2lab.errors import ConfigError
from gpt2lab.flags import RENAMED, Command, Verbs, parse
from gpt2lab.plan import BatchPlan, count_parameters, count_steps, make_plan, plan_batches
from gpt2lab.presets import PRESETS, preset
from gpt2lab.settings import (
    ARCHITECTURE,
    LEAVES,
    find_problems,
    is_path,
    override,
    policy_of,
    to_flat,
)
from gpt2lab.start import decide

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"


# -- the surface -----------------------------------------------------------------------------------------------------


def type_text(annotation: Any) -> str:
    """Write a type the same in every version of Python."""
    if annotation is None or annotation is type(None):
        return "none"
    if get_origin(annotation) is typing.Literal:
        return "|".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return "|".join(type_text(part) for part in get_args(annotation))
    return str(annotation.__name__).lower()


def describe_flags() -> str:
    """Write down every flag: type, default, policy, help; sorted as people meet them."""
    blocks = []
    for section in (Verbs, *(part.default_factory for part in dataclasses.fields(Config))):
        hints = typing.get_type_hints(section)
        for leaf in dataclasses.fields(section):  # type: ignore[arg-type]
            default = str(leaf.default) if isinstance(leaf.default, Path) else leaf.default
            policy = leaf.metadata.get("policy", "verb")
            help = textwrap.fill(leaf.metadata["help"], 90, **_INDENT)
            blocks.append(
                f"--{leaf.name}  {type_text(hints[leaf.name])}  = {default!r}  [{policy}]\n{help}\n"
            )
    return "\n".join(blocks)


_INDENT: dict[str, Any] = {"initial_indent": "    ", "subsequent_indent": "    "}


def test_the_flags_are_those_that_the_golden_file_holds() -> None:
    golden, now = GOLDEN.read_text(), describe_flags()
    changes = "\n".join(
        difflib.unified_diff(
            golden.splitlines(), now.splitlines(), "golden", "now", lineterm="", n=1
        )
    )
    assert golden == now, (
        "Flags, types, defaults, policies and help are a contract with scripts and saved runs.\n"
        "If this change is meant, run `python tests/test_flags.py` and commit tests/golden/flags.txt"
        f" with it:\n{changes}"
    )


def test_every_setting_has_a_name_of_its_own() -> None:
    names = [
        leaf.name
        for section in (Verbs, *(part.default_factory for part in dataclasses.fields(Config)))
        for leaf in dataclasses.fields(section)  # type: ignore[arg-type]
    ]
    assert sorted(set(names)) == sorted(names)
    assert not set(RENAMED) & set(names)
    assert set(LEAVES) == set(names) - {field.name for field in dataclasses.fields(Verbs)}


def test_every_flag_of_the_contract_is_there() -> None:
    contract = """model n_layer n_head n_embd context_length vocab_size dropout data_dir shuffle seed
        total_batch_size mini_batch_size max_lr min_lr warmup_steps lr_schedule weight_decay
        grad_clip max_steps max_tokens num_epochs stop_after_steps eval_freq val_tokens sample_freq
        hellaswag_freq checkpoint_freq log_freq keep_checkpoints keep_emergency_checkpoints
        checkpoint_dir run_name use_tensorboard device dtype compile parallel resume
        list_checkpoints dry_run json allow_change"""
    assert set(contract.split()) <= set(LEAVES) | set(Verbs.__dataclass_fields__)


def test_the_defaults_of_the_contract_hold() -> None:
    flat = to_flat(Config())
    assert flat["dropout"] == 0.0
    assert flat["seed"] == 1337
    assert flat["total_batch_size"] == 524_288
    assert flat["mini_batch_size"] == 16
    assert flat["max_lr"] == 6e-4
    assert flat["weight_decay"] == 0.1
    assert flat["grad_clip"] == 1.0
    assert flat["keep_checkpoints"] == 10
    assert flat["vocab_size"] == 50_304
    assert (flat["model"], flat["context_length"], flat["shuffle"]) == ("gpt2", 1024, "shards")


def test_only_the_architecture_and_the_first_weights_are_fixed() -> None:
    fixed_names = {name for name in LEAVES if policy_of(name, Config()) == "fixed"}
    shape = {"n_layer", "n_head", "n_embd", "context_length", "vocab_size"}
    options = {"positions", "norm", "qk_norm", "activation"}
    lora = {"lora_r", "lora_alpha", "lora_targets"}
    assert fixed_names == shape | options | lora | {"init_from"}
    assert set(ARCHITECTURE) == shape | options


def test_what_only_observes_or_places_a_run_is_free() -> None:
    names = """data_dir eval_freq val_tokens sample_freq hellaswag_freq checkpoint_freq log_freq
        keep_checkpoints keep_emergency_checkpoints checkpoint_dir run_name use_tensorboard device
        compile parallel activation_checkpointing mini_batch_size"""
    assert {policy_of(name, Config()) for name in names.split()} == {"free"}


def test_the_mathematics_is_guarded() -> None:
    names = """dropout shuffle seed total_batch_size max_lr min_lr warmup_steps lr_schedule wsd_decay
        weight_decay grad_clip max_steps max_tokens num_epochs dtype"""
    assert {policy_of(name, Config()) for name in names.split()} == {"guarded"}


def test_the_micro_batch_is_guarded_as_soon_as_there_is_dropout() -> None:
    assert policy_of("mini_batch_size", override(Config(), {"dropout": 0.1})) == "guarded"


def test_a_setting_keeps_its_help_and_policy_at_the_field() -> None:
    @dataclasses.dataclass(frozen=True)
    class Part:
        width: int = fixed(3, "how wide")

    (leaf,) = dataclasses.fields(Part)
    assert (Part().width, dict(leaf.metadata)) == (3, {"help": "how wide", "policy": "fixed"})


# -- which value wins ------------------------------------------------------------------------------------------------


def fresh(*argv: str) -> dict[str, Any]:
    return to_flat(parse(list(argv)).fresh())


def test_a_typed_flag_beats_the_preset_and_the_preset_beats_the_default() -> None:
    assert fresh()["n_layer"] == 12
    assert fresh("--model=gpt2-micro")["n_layer"] == 4
    assert fresh("--model=gpt2-micro", "--n_layer=5")["n_layer"] == 5
    assert fresh("--n_layer=5", "--model=gpt2-micro")["n_layer"] == 5
    assert fresh("--model=gpt2-micro", "--n_layer=5")["n_head"] == 4
    assert fresh("--model=gpt2-micro", "--n_layer=12")["n_layer"] == 12  # typed the default itself
    assert fresh("--model=gpt2-micro")["weight_decay"] == 0.1


def test_a_typed_flag_beats_the_saved_value_and_the_saved_value_beats_the_preset() -> None:
    micro = parse(["--model=gpt2-micro"]).fresh()  # what is saved has absolute paths
    saved = override(micro, {"n_layer": 7, "max_lr": 0.5, "seed": 3})
    over = to_flat(parse(["--max_lr=0.25"]).over(saved))
    assert (over["n_layer"], over["max_lr"], over["seed"]) == (7, 0.25, 3)
    assert {name for name, value in to_flat(saved).items() if over[name] != value} == {"max_lr"}


def test_typing_a_saved_value_again_changes_nothing() -> None:
    micro = parse(["--model=gpt2-micro"]).fresh()
    saved = override(micro, {"n_layer": 7, "num_epochs": 2.0})
    command = parse(["--model=gpt2-micro", "--n_layer=7", "--num_epochs=2"])
    assert to_flat(command.over(saved)) == to_flat(saved)


def test_another_typed_preset_counts_as_typing_each_of_its_settings() -> None:
    saved = override(preset("gpt2-micro"), {"n_layer": 7, "seed": 3})
    over = to_flat(parse(["--model=gpt2-mini", "--n_embd=96"]).over(saved))
    assert (over["model"], over["n_layer"], over["n_embd"], over["seed"]) == ("gpt2-mini", 6, 96, 3)


def test_a_typed_length_replaces_a_saved_one_in_another_unit() -> None:
    saved = override(Config(), {"num_epochs": 1.0})
    over = to_flat(parse(["--max_steps=10"]).over(saved))
    assert (over["max_steps"], over["max_tokens"], over["num_epochs"]) == (10, None, None)


@pytest.mark.parametrize(
    "argv",
    [
        ("--n_layer=3", "--use_tensorboard"),
        ("--n_layer", "3", "--use_tensorboard"),
        ("--n-layer=3", "--use-tensorboard"),
    ],
)
def test_flags_may_be_written_with_equals_or_space_underscore_or_hyphen(argv: tuple) -> None:
    flat = fresh(*argv)
    assert (flat["n_layer"], flat["use_tensorboard"]) == (3, True)
    assert parse(list(argv)).typed == {"n_layer", "use_tensorboard"}


def test_a_switch_can_be_typed_off_again() -> None:
    saved = override(Config(), {"use_tensorboard": True})
    command = parse(["--no_use_tensorboard"])
    assert command.typed == {"use_tensorboard"}
    assert command.over(saved).log.use_tensorboard is False
    assert parse([]).over(saved).log.use_tensorboard is True


def test_a_default_path_is_at_the_repository_and_a_typed_one_at_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    repository = Path(__file__).resolve().parents[1]
    assert repository == paths.REPOSITORY
    flat = fresh()
    assert flat["checkpoint_dir"] == str(repository / "checkpoints")
    assert flat["data_dir"] == str(repository / "data" / "fineweb_edu")
    assert fresh("--model=gpt2-nano")["data_dir"] == str(repository / "data" / "python_stdlib")
    flat = fresh("--checkpoint_dir=runs", "--data_dir", "d", "--hellaswag_path=/x/y.jsonl")
    assert flat["checkpoint_dir"] == str(tmp_path / "runs")
    assert flat["data_dir"] == str(tmp_path / "d")
    assert flat["hellaswag_path"] == "/x/y.jsonl"


def test_a_saved_path_stays_and_a_typed_one_over_it_is_at_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = override(Config(), {"data_dir": "/corpora/a"})
    assert parse(["--seed=1"]).over(saved).data.data_dir == Path("/corpora/a")
    assert parse(["--data_dir=a"]).over(saved).data.data_dir == tmp_path / "a"


def test_verbs_are_no_settings() -> None:
    command = parse(["--resume=auto", "--stop_after_steps=5", "--dry_run", "--json"])
    assert command.typed == frozenset()
    verbs = Verbs(resume="auto", stop_after_steps=5, dry_run=True, json=True)
    assert command.verbs == verbs
    assert parse([]).verbs == Verbs()


# -- what is refused -------------------------------------------------------------------------------------------------


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--n_layers=3", "--n_layer"),
        ("--max_step", "--max_steps"),
        ("--mini_batchsize=4", "--mini_batch_size"),
        ("--list_checkpoint", "--list_checkpoints"),
        ("--checkpoints_dir=x", "--checkpoint_dir"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_known_one(typed: str, meant: str) -> None:
    assert refusal(typed) == f"unknown flag {typed.partition('=')[0]}: did you mean {meant}?"


def test_an_unknown_flag_that_resembles_nothing_gets_no_guess() -> None:
    assert refusal("--qqqq=1") == "unknown flag --qqqq: see --help"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_layers", "n_layer"),
        ("embd_size", "n_embd"),
        ("num_heads", "n_head"),
        ("logdir", "checkpoint_dir"),
        ("tensorboard_dir", "checkpoint_dir"),
        ("steps_per_epoch", "num_epochs"),
    ],
)
@pytest.mark.parametrize("form", ["--{}=3", "--{} 3"])
def test_a_flag_of_the_ancestor_names_the_one_it_is_now(old: str, new: str, form: str) -> None:
    message = refusal(*form.format(old).split())
    assert message.startswith(f"unknown flag --{old}: it is now --{new}")
    assert new in LEAVES


@pytest.mark.parametrize(
    "pair",
    list(itertools.combinations(("--max_steps=3", "--max_tokens=5000", "--num_epochs=1"), 2)),
)
def test_two_lengths_of_a_run_are_refused(pair: tuple[str, str]) -> None:
    first, second = (flag.partition("=")[0] for flag in pair)
    assert refusal(*pair).startswith(f"{first} and {second} both set the length of the run")
    assert refusal(*reversed(pair)) == refusal(*pair)


def test_fp16_is_refused_with_the_reason() -> None:
    message = refusal("--dtype=fp16")
    assert "'fp16'" in message
    assert "loss scaling" in message
    assert "bf16 or fp32" in message


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--n_layer=two",), "--n_layer"),
        (("--n_layer",), "--n_layer"),
        (("--max_lr=fast",), "--max_lr"),
        (("--model=gpt3",), "gpt2-xl"),
        (("--shuffle=all",), "'shards', 'windows', 'none'"),
        (("stray",), "'stray'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line(argv: tuple[str, ...], part: str) -> None:
    assert part in refusal(*argv)


PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"n_head": 5}, "n_embd 768 is not a multiple of n_head 5"),
    ({"n_head": 0}, "n_head 0 must be at least 1"),
    ({"n_layer": 0}, "n_layer 0 must be at least 1"),
    ({"context_length": 0}, "context_length 0 must be at least 1"),
    ({"vocab_size": 1}, "vocab_size 1 must be at least 2"),
    ({"mini_batch_size": 0}, "mini_batch_size 0 must be at least 1"),
    ({"dropout": 1.0}, "dropout 1.0 must be in [0, 1)"),
    ({"dropout": -0.1}, "dropout -0.1 must be in [0, 1)"),
    ({"seed": -1}, "seed -1 must be at least 0"),
    ({"seed": 2**32}, "seed 4294967296 must be below 2**32"),
    ({"max_lr": 0.0}, "max_lr 0.0 must be above 0"),
    ({"max_lr": math.inf}, "max_lr inf is not a finite number"),
    ({"grad_clip": math.inf}, "grad_clip inf is not a finite number"),
    ({"min_lr": 1.0}, "min_lr 1.0 is above max_lr 0.0006"),
    ({"min_lr": -1.0}, "min_lr -1.0 must be at least 0"),
    ({"weight_decay": -0.1}, "weight_decay -0.1 must be at least 0"),
    ({"wsd_decay": 0.0}, "wsd_decay 0.0 must be in (0, 1]"),
    ({"warmup_steps": -1}, "warmup_steps -1 must be at least 0"),
    ({"max_steps": 0}, "max_steps 0 must be at least 1"),
    ({"num_epochs": 0.0}, "num_epochs 0.0 must be above 0"),
    ({"max_steps": 1, "num_epochs": 1.0}, "max_steps and num_epochs both set the length"),
    ({"eval_freq": -1}, "eval_freq -1 must be at least 0"),
    ({"log_freq": 0}, "log_freq 0 must be at least 1"),
    ({"keep_checkpoints": 0}, "keep_checkpoints 0 must be at least 1"),
    ({"run_name": "a/b"}, "run_name 'a/b' must be a plain folder name"),
    ({"run_name": ".hidden"}, "run_name '.hidden' must be a plain folder name"),
    ({"run_name": ""}, "run_name '' must be a plain folder name"),
]


@pytest.mark.parametrize(("values", "problem"), PROBLEMS)
def test_a_setting_that_cannot_work_is_one_problem_with_its_value(
    values: dict[str, Any], problem: str
) -> None:
    (found,) = find_problems(override(Config(), values))
    assert found.startswith(problem)


def test_the_defaults_and_every_preset_have_no_problem() -> None:
    for name in PRESETS:
        assert find_problems(preset(name)) == []
    assert find_problems(Config()) == []


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    argv = [
        "--n_head=5",
        "--seed=-1",
        "--dropout=2",
        "--log_freq=0",
        f"--checkpoint_dir={tmp_path}",
    ]
    with pytest.raises(ConfigError) as error:
        decide(parse(argv), world_size=1, set_aside=False)
    for name in ("n_head 5", "seed -1", "dropout 2.0", "log_freq 0"):
        assert name in str(error.value)
    assert "\n" not in str(error.value)


# -- flat and nested -------------------------------------------------------------------------------------------------

CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "n_layer": st.integers(1, 99),
    "max_lr": st.floats(1e-6, 1.0),
    "min_lr": st.none() | st.floats(0, 1e-6),
    "num_epochs": st.none() | st.floats(0.1, 9),
    "data_dir": st.sampled_from(["/a/b", "c"]),
    "hellaswag_path": st.none() | st.just("/h.jsonl"),
    "run_name": st.none() | st.text(min_size=1),
    "use_tensorboard": st.booleans(),
    "shuffle": st.sampled_from(["shards", "windows", "none"]),
    "model": st.sampled_from(sorted(PRESETS)),
}


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_flat_values_put_over_the_defaults_are_the_config_again(changes: dict[str, Any]) -> None:
    config = override(Config(), changes)
    flat = to_flat(config)
    assert {name: flat[name] for name in changes} == changes
    assert override(Config(), flat) == config
    untouched = to_flat(Config())
    assert all(flat[name] == untouched[name] for name in LEAVES if name not in changes)


def test_paths_are_paths_in_the_config_and_text_in_the_flat_form() -> None:
    path_names = {name for name in LEAVES if is_path(name)}
    assert path_names == {"data_dir", "hellaswag_path", "checkpoint_dir"}
    config = override(Config(), {"hellaswag_path": "x"})
    assert config.eval.hellaswag_path == Path("x")
    assert to_flat(config)["hellaswag_path"] == "x"


def test_a_setting_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown settings n_leyer, quux: written by another"):
        override(Config(), {"n_layer": 3, "quux": 1, "n_leyer": 2})


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_the_presets_are_the_sizes_that_openai_released(name: Any, parameters: int) -> None:
    model = dataclasses.replace(preset(name).model, vocab_size=50257)
    assert count_parameters(model) == parameters


def test_the_closed_form_counts_what_is_listed_tensor_by_tensor() -> None:
    model = ModelConfig(n_layer=3, n_head=2, n_embd=10, context_length=7, vocab_size=11)
    block = [
        *(10, 10),  # first norm
        *(10 * 30, 30),  # query, key, value
        *(10 * 10, 10),  # output of attention
        *(10, 10),  # second norm
        *(10 * 40, 40, 40 * 10, 10),  # MLP
    ]
    assert count_parameters(model) == 11 * 10 + 7 * 10 + 3 * sum(block) + (10 + 10)


@pytest.mark.parametrize(("total", "world"), [(96, 1), (96, 2), (480, 5)])
def test_the_batch_is_world_times_accumulation_times_micro_batch(total: int, world: int) -> None:
    batch = BatchConfig(total_batch_size=total, mini_batch_size=3)
    plan = plan_batches(batch, context_length=4, world_size=world)
    assert plan == BatchPlan(total // 4, 3, total // (4 * 3 * world), world, 4)
    assert plan.samples == plan.world_size * plan.accumulation * plan.mini_batch_size
    assert plan.tokens == total


def test_a_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
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


LENGTHS_OF_RUNS: list[tuple[dict[str, Any], int]] = [
    ({"max_steps": 7}, 7),
    ({"max_tokens": 640}, 10),
    ({"max_tokens": 703}, 10),
    ({"max_tokens": 704}, 11),
    ({"num_epochs": 1.0}, 6),  # 25 windows in steps of 4
    ({"num_epochs": 2.0}, 12),
    ({"num_epochs": 0.5}, 3),
    ({"num_epochs": 0.16}, 1),
    ({}, 6),
]


@pytest.mark.parametrize(("length", "steps"), LENGTHS_OF_RUNS)
def test_steps_tokens_and_epochs_become_whole_steps(length: dict[str, Any], steps: int) -> None:
    batch = BatchConfig(total_batch_size=64)
    counted = count_steps(LengthConfig(**length), batch, context_length=16, windows_per_epoch=25)
    assert counted == steps


@pytest.mark.parametrize(
    ("length", "given"), [({"max_tokens": 63}, "max_tokens 63"), ({"num_epochs": 0.15}, "0.15")]
)
def test_less_than_one_step_is_refused(length: dict[str, Any], given: str) -> None:
    batch = BatchConfig(total_batch_size=64)
    with pytest.raises(ConfigError, match=f"{given}.* less than one step of 64 tokens"):
        count_steps(LengthConfig(**length), batch, context_length=16, windows_per_epoch=25)


def test_a_plan_adds_up() -> None:
    config = override(Config(), {"total_batch_size": 64, "mini_batch_size": 2, "num_epochs": 2.0})
    config = override(config, {"context_length": 16, "checkpoint_freq": 5, "keep_checkpoints": 2})
    plan = make_plan(config, world_size=2, windows_per_epoch=25)
    assert (plan.max_steps, plan.tokens, plan.epochs) == (12, 12 * 64, 12 * 4 / 25)
    assert plan.batch.accumulation == 1
    assert plan.checkpoint_bytes == 3 * 4 * plan.parameters  # weights and two moments, fp32
    assert plan.disk_bytes == plan.retained_checkpoints * plan.checkpoint_bytes
    assert (
        plan.retained_checkpoints >= 2 + 1 + 2
    )  # rolling, one whole epoch, best and the one before


def tiny(tiny_flags: list[str], *more: str) -> Command:
    return parse([*tiny_flags, *more])


def test_warm_up_longer_than_the_run_is_refused(tiny_flags: list[str]) -> None:
    start = decide(
        tiny(tiny_flags, "--max_steps=9", "--warmup_steps=9"), world_size=1, set_aside=False
    )
    assert start.plan.max_steps == 9
    with pytest.raises(ConfigError, match="warmup_steps 10 is longer than the run of 9 steps"):
        decide(
            tiny(tiny_flags, "--max_steps=9", "--warmup_steps=10"), world_size=1, set_aside=False
        )


def test_what_was_left_open_is_decided_at_the_start_and_nothing_is_written(
    tiny_flags: list[str], tmp_path: Path
) -> None:
    start = decide(tiny(tiny_flags, "--max_lr=0.01"), world_size=1, set_aside=False)
    flat = to_flat(start.config)
    steps = sum((size - 1) // 16 for size in (1003, 777, 1290)) // 8
    assert start.plan.max_steps == steps
    assert (flat["num_epochs"], flat["max_steps"], flat["max_tokens"]) == (1.0, None, None)
    assert flat["min_lr"] == pytest.approx(0.001)
    assert flat["warmup_steps"] == steps // 10
    assert start.attempt == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_name_is_named_by_model_and_time(tiny_flags: list[str]) -> None:
    flags = [flag for flag in tiny_flags if not flag.startswith("--run_name")]
    start = decide(parse(flags), world_size=1, set_aside=False)
    model, date, clock = start.run_dir.name.replace("_", "-").split("-")
    assert (model, len(date), len(clock)) == ("gpt2", 8, 6)
    assert (date + clock).isdigit()


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(describe_flags())
    print(f"wrote {GOLDEN}")
