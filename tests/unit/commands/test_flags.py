"""The command line: what every flag is, which value wins, and what is rejected in one line.

`python tests/unit/commands/test_flags.py` rewrites tests/golden/flags.txt.
"""

import dataclasses
import difflib
import itertools
import re
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))  # for `python tests/...`

import pytest

from gpt2lab import paths
from gpt2lab.commands import command_line
from gpt2lab.commands.command_line import Actions
from gpt2lab.config.other_programs import FLAGS, RENAMED, VALUES
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import LEAVES, override, policy_of, to_flat
from gpt2lab.errors import ConfigError
from gpt2lab.planner.alternatives import learning_rates
from gpt2lab.planner.request import EstimateRequest, settings_of
from gpt2lab.report import page as report
from tiny import fresh, parse

GOLDEN = Path(__file__).parents[2] / "golden" / "flags.txt"
SECTIONS: list[Any] = [Actions, *(part.default_factory for part in dataclasses.fields(Config))]


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
    for section in SECTIONS:
        hints = typing.get_type_hints(section)
        for leaf in dataclasses.fields(section):
            if leaf.metadata.get("is_hidden"):
                continue  # a setting without a flag
            default = str(leaf.default) if isinstance(leaf.default, Path) else leaf.default
            policy = leaf.metadata.get("policy", "action")
            help = textwrap.indent(textwrap.fill(leaf.metadata["help"], 86), "    ")
            head = f"--{leaf.name}  {type_text(hints[leaf.name])}  = {default!r}  [{policy}]"
            blocks.append(f"{head}\n{help}\n")
    return "\n".join(blocks)


def test_the_flags_are_those_that_the_golden_file_holds():
    golden, now = GOLDEN.read_text(), describe_flags()
    lines = (golden.splitlines(), now.splitlines(), "golden", "now")
    changes = "\n".join(difflib.unified_diff(*lines, lineterm="", n=1))
    assert golden == now, (
        "Flags, types, defaults, policies and help are a contract with scripts and saved runs.\n"
        "If this change is meant, run `python tests/unit/commands/test_flags.py` and commit tests/golden/flags.txt"
        f" with it:\n{changes}"
    )


def test_every_setting_has_a_name_of_its_own():
    names = [leaf.name for section in SECTIONS for leaf in dataclasses.fields(section)]
    assert sorted(set(names)) == sorted(names)
    assert not {*RENAMED, *FLAGS} & set(names)
    assert set(LEAVES) == set(names) - {field.name for field in dataclasses.fields(Actions)}
    dropout = override(Config(), {"dropout": 0.1})
    assert policy_of("mini_batch_size", dropout) == "guarded", "as soon as there is dropout"


def test_a_typed_flag_beats_the_preset_and_the_preset_beats_the_default():
    assert (fresh()["n_layer"], fresh("--model=gpt2-micro")["n_layer"]) == (12, 4)
    for flat in (
        fresh("--model=gpt2-micro", "--n_layer=5"),
        fresh("--n_layer=5", "--model=gpt2-micro"),
    ):
        assert (flat["n_layer"], flat["n_head"], flat["weight_decay"]) == (5, 4, 0.1)
    assert fresh("--model=gpt2-micro", "--n_layer=12")["n_layer"] == 12  # typed the default itself


def test_a_typed_flag_beats_the_saved_value_and_the_saved_value_beats_the_preset():
    micro = parse(["--model=gpt2-micro"]).config  # what is saved has absolute paths
    saved = override(micro, {"n_layer": 7, "max_lr": 0.5, "seed": 3, "num_epochs": 2.0})
    over = to_flat(parse(["--max_lr=0.25"]).over(saved))
    assert (over["n_layer"], over["max_lr"], over["seed"]) == (7, 0.25, 3)
    assert {name for name, value in to_flat(saved).items() if over[name] != value} == {"max_lr"}
    command = parse(["--model=gpt2-micro", "--n_layer=7", "--num_epochs=2"])
    assert to_flat(command.over(saved)) == to_flat(saved)
    # Another typed preset counts as typing each of its settings.
    over = to_flat(parse(["--model=gpt2-mini", "--n_embd=96"]).over(saved))
    assert (over["model"], over["n_layer"], over["n_embd"], over["seed"]) == ("gpt2-mini", 6, 96, 3)
    # A typed length replaces a saved one in another unit.
    over = to_flat(parse(["--max_steps=10"]).over(saved))
    assert (over["max_steps"], over["max_tokens"], over["num_epochs"]) == (10, None, None)
    # A switch can be typed off again.
    saved = override(Config(), {"use_tensorboard": True})
    command = parse(["--no_use_tensorboard"])
    assert command.typed == {"use_tensorboard"}
    assert command.over(saved).log.use_tensorboard is False
    assert parse([]).over(saved).log.use_tensorboard is True


def test_adamw_for_all_weights_of_a_modern_model_has_the_rate_of_its_gpt2(tmp_path):
    def rate(*argv: str) -> float:
        return float(fresh(*argv)["max_lr"])

    theirs, modern = rate("--model=gpt2-micro"), rate("--model=modern-micro")
    assert theirs < modern == rate("--model=modern-micro", "--optimizer=muon")
    assert rate("--model=modern-micro", "--optimizer=adamw") == theirs
    assert rate("--model=modern-small", "--optimizer=adamw") == rate("--model=gpt2")
    assert rate("--model=modern-micro", "--optimizer=adamw", "--max_lr=0.5") == 0.5
    file = tmp_path / "adamw.toml"
    file.write_text('model = "modern-micro"\noptimizer = "adamw"\n')
    assert rate(f"--config={file}") == theirs
    over = parse(["--model=modern-mini", "--optimizer=adamw"]).over(preset("gpt2-micro"))
    assert to_flat(over)["max_lr"] == rate("--model=gpt2-mini")
    asked = settings_of(EstimateRequest(model="modern-micro", optimizer="adamw"))
    assert learning_rates(asked)["reference_rate"] == asked.optim.max_lr == theirs
    settings = report._settings(asked, frozenset({"optimizer"}))
    rows = {name: differs for name, _, _, differs in settings}
    assert (rows["optimizer"], rows["max_lr"], rows["muon_lr"]) == (True, False, False)


@pytest.mark.parametrize("layers", ["--n_layer=3", "--n_layer 3", "--n-layer=3"])
@pytest.mark.parametrize("switch", ["--use_tensorboard", "--use-tensorboard"])
def test_flags_may_be_written_with_equals_or_space_underscore_or_hyphen(layers, switch):
    argv = [*layers.split(), switch]
    flat = fresh(*argv)
    assert (flat["n_layer"], flat["use_tensorboard"]) == (3, True)
    assert parse(argv).typed == {"n_layer", "use_tensorboard"}


@pytest.mark.parametrize(
    ("typed", "value"), [("2M", 2_000_000), ("2.5k", 2500), ("4_096", 4096), ("7", 7)]
)
def test_a_whole_number_may_have_a_unit_of_thousands(typed, value):
    assert fresh(f"--max_tokens={typed}")["max_tokens"] == value
    assert fresh(f"--total_batch_size={typed}")["total_batch_size"] == value


def test_a_default_path_is_at_the_repository_a_typed_one_where_one_works(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    repository = Path(__file__).resolve().parents[3]
    assert repository == paths.REPOSITORY
    flat = fresh()
    assert flat["checkpoint_dir"] == str(repository / "checkpoints")
    assert flat["data_dir"] == str(repository / "data" / "fineweb_edu")
    assert fresh("--model=gpt2-nano")["data_dir"] == str(repository / "data" / "python_stdlib")
    flat = fresh("--checkpoint_dir=runs", "--data_dir", "d", "--hellaswag_path=/x/y.jsonl")
    assert flat["checkpoint_dir"] == str(tmp_path / "runs")
    assert (flat["data_dir"], flat["hellaswag_path"]) == (str(tmp_path / "d"), "/x/y.jsonl")
    saved = override(Config(), {"data_dir": "/corpora/a"})
    assert to_flat(parse(["--seed=1"]).over(saved))["data_dir"] == "/corpora/a"
    assert to_flat(parse(["--data_dir=a"]).over(saved))["data_dir"] == str(tmp_path / "a")


def test_actions_are_no_settings():
    command = command_line.parse(["--resume=auto", "--stop_after_steps=5", "--dry_run", "--json"])
    assert command.request.typed == frozenset()
    assert command.actions == Actions(resume="auto", stop_after_steps=5, dry_run=True, json=True)
    assert command_line.parse([]).actions == Actions()


def rejection(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("num_layers", "n_layer"), ("embd_size", "n_embd"), ("num_heads", "n_head")),
        *(("logdir", "checkpoint_dir"), ("tensorboard_dir", "checkpoint_dir")),
        ("steps_per_epoch", "num_epochs"),
    ],
)
@pytest.mark.parametrize("form", ["--{}=3", "--{} 3"])
def test_a_flag_of_the_predecessor_names_the_one_it_is_now(old, new, form):
    message = rejection(*form.format(old).split())
    assert message.startswith(f"unknown flag --{old}: it is now --{new}")
    assert new in LEAVES


@pytest.mark.parametrize("theirs", FLAGS)
def test_a_flag_of_another_program_names_ours(theirs):
    assert rejection(f"--{theirs}", "1") == f"unknown flag --{theirs}: here it is {FLAGS[theirs]}"
    words = re.findall(r"(?<!\S)--(\w+)", FLAGS[theirs])
    elsewhere = {"nproc_per_node", "nnodes", "tokenizer"}  # torchrun's, prepare_data.py's
    assert set(words) <= {*LEAVES, *Actions.__dataclass_fields__, *elsewhere}


@pytest.mark.parametrize(
    ("flag", "theirs"), [(flag, theirs) for flag, values in VALUES.items() for theirs in values]
)
@pytest.mark.parametrize("form", ["--{}={}", "--{} {}"])
def test_a_value_of_another_program_names_ours(flag, theirs, form):
    message = rejection(*form.format(flag, theirs).split())
    assert message == f"--{flag} {theirs}: here it is {VALUES[flag][theirs]}"
    parse([f"--{flag}", VALUES[flag][theirs].split()[0]])


@pytest.mark.parametrize(
    "pair",
    list(itertools.combinations(("--max_steps=3", "--max_tokens=5000", "--num_epochs=1"), 2)),
)
def test_two_lengths_of_a_run_are_rejected(pair):
    first, second = (flag.partition("=")[0] for flag in pair)
    assert rejection(*pair).startswith(f"{first} and {second} both set the length of the run")
    assert rejection(*reversed(pair)) == rejection(*pair)


@pytest.mark.parametrize(
    "typed",
    [
        *("--n_layer=two", "--n_layer=1.5", "--n_layer", "--max_lr=fast", "--weight_decay 0,1"),
        *("--shuffle=all", "--model hf:gpt2", "--preset gpt2-nano", "stray", "a b"),
        *("-resume latest", "config/train.py", "--num_workers 4", "--num_token=4", "--qqqq=1"),
        *("--n_layers=3", "--max_step", "--mini_batchsize=4", "--list_checkpoint"),
        *("--checkpoints_dir=x", "--use_tensorboard false", "--use_tensorboard=false"),
        *("--use-tensorboard True --seed=1", "--dry_run=false"),
        "--seed=1.5 --n_layr 3 --dtype=bfloat16 --max_lr x --use_wandb=true --max_steps",
    ],
)
def test_what_cannot_be_is_rejected_in_one_line(typed, wording):
    wording(rejection(*typed.split()))


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(describe_flags())
    print(f"wrote {GOLDEN}")
