"""`--config FILE`: which value wins, what is rejected and where, and an equal run."""

import json
from pathlib import Path
from typing import Any

import pytest

from corpora import TEXTS, run_prepare, write_jsonl
from gpt2lab.config.presets import for_length, preset
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override, record, to_flat
from gpt2lab.config.settings_file import make_request, read_file, read_values, write_file
from gpt2lab.errors import ConfigError
from gpt2lab.tokenizers.plain import BYTES
from gpt2lab.training.resolve import fresh_settings, resolve
from launch import losses, train_in_forks, worked
from tiny import edit_json, fresh, parse


def write(folder: Path, text: str, name: str = "settings.toml") -> str:
    (folder / name).write_text(text)
    return f"--config={folder / name}"


def test_a_file_stands_above_the_preset_and_below_what_is_typed(tmp_path, monkeypatch):
    file = write(tmp_path, 'model = "gpt2-micro"\nn_layer = 3\nmax_lr = 1\nmax_steps = 9\n')
    flat = fresh(file)
    assert (flat["model"], flat["n_layer"], flat["n_head"]) == ("gpt2-micro", 3, 4)
    assert flat["max_lr"] == 1.0
    assert isinstance(flat["max_lr"], float)
    assert fresh(file, "--n_layer=5")["n_layer"] == 5
    assert fresh(file, "--max_tokens=1M")["max_steps"] is None  # a typed length replaces the file's
    nameless = write(tmp_path, "max_lr = 0.5\n", "nameless.toml")
    flat = fresh(nameless, "--model=gpt2-mini")
    assert (flat["n_layer"], flat["max_lr"]) == (6, 0.5)
    typed = fresh(file, "--model=gpt2-mini")  # another preset counts as typing each of its settings
    assert (typed["n_layer"], typed["max_lr"]) == (6, 1e-3)
    # What only the other preset had is gone, from a run's settings and from a file by hand.
    modern = override(preset("modern-micro"), {"log_freq": 7, "checkpoint_dir": tmp_path})
    values = record(modern, ["model", "norm", "log_freq", "checkpoint_dir"])
    flat = fresh("--model=gpt2", "--norm=rmsnorm", "--log_freq=7", f"--checkpoint_dir={tmp_path}")
    for content in (values, {name: values[name] for name in values["chosen"]}):
        assert fresh(write(tmp_path, json.dumps(content), "a.json"), "--model=gpt2") == flat
    # Its paths are at the working directory.
    (tmp_path / "settings").mkdir()
    file = write(tmp_path / "settings", 'data_dir = ["a:1", "b:2"]\ncheckpoint_dir = "runs"\n')
    monkeypatch.chdir(tmp_path)
    flat = fresh(file)
    assert flat["data_dir"] == [f"{tmp_path}/a:1", f"{tmp_path}/b:2"]
    assert flat["checkpoint_dir"] == f"{tmp_path}/runs"


def test_a_file_stands_above_what_a_run_has_saved(tmp_path):
    saved = parse(["--model=gpt2-micro", "--seed=3", "--num_epochs=2"]).config
    file = write(tmp_path, "log_freq = 7\nmax_steps = 9\n")
    flat = to_flat(parse([file, "--seed=4"]).over(saved))
    assert (flat["log_freq"], flat["seed"], flat["n_layer"]) == (7, 4, 4)
    assert (flat["max_steps"], flat["num_epochs"]) == (9, None)
    assert parse(["--model=modern-mini"]).over(saved).model.positions == "rotary"


def test_none_is_no_value_typed_in_a_file_and_on_a_resume(tmp_path):
    had = {"track": "wandb", "checkpoint_mirror": "s3://a/b", "hellaswag_path": "x", "min_lr": 1e-5}
    saved, file = override(Config(), had), "".join(f'{name} = "None"\n' for name in had)
    for argv in ([f"--{name}=None" for name in had], [write(tmp_path, file)]):
        flat = to_flat(parse(argv).over(saved))
        assert [flat[name] for name in had] == [None] * 4
    with pytest.raises(ConfigError, match="line 1: seed 'None' is not a whole number"):
        parse([write(tmp_path, 'seed = "None"\n')])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "seed = 1\n\nmax_step = 5\n"),
        ("a.json", '{\n "seed": 1,\n "n_leyer": 2\n}'),
        ("a.toml", "seed = 1\nn_layer = 'two'\n"),
        ("a.toml", "[optim]\nmax_lr = 1.0\n"),
        ("a.toml", "seed = 1\nseed = 2\n"),
        *(("a.json", '{"seed": 1, "seed": 2}'), ("a.json", "[1]"), ("a.json", '{"seed": 1')),
        *(("a.toml", "qqqq = 1\n"), ("a.toml", 'instructions = "demo"\n')),
        *(("a.toml", "batch_size = 4\n"), ("a.json", '{"learning_rate": 1}')),
        *(("a.toml", "num_workers = 4\n"), ("a.toml", "num_tokenz = 4\n")),
        *(("a.toml", "lora_r = 4\n"), ("a.json", '{"num_tokens": 300, "lora_r": 4}')),
        *(("a.toml", 'dtype = "bfloat16"\n'), ("a.toml", "compile = true\n")),
        ("a.yaml", "seed: 1\n"),
    ],
)
def test_what_a_file_cannot_say_is_named_with_its_line(name, text, tmp_path, wording):
    with pytest.raises(ConfigError, check=wording):
        parse([write(tmp_path, text, name)])


def test_all_problems_of_a_file_come_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"line 1: unknown .*; line 2: seed 1\.5 is not"):
        parse([write(tmp_path, "max_step = 5\nseed = 1.5\n")])
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        parse([f"--config={tmp_path / 'none.toml'}"])
    for name, text in (("deep.toml", "x = " + "[" * 9999), ("deep.json", "[" * 99999)):
        with pytest.raises(ConfigError, match=rf"{name}: maximum recursion depth"):
            parse([write(tmp_path, text, name)])


def test_a_run_s_config_json_starts_an_equal_run(run, tmp_path):
    """Its own settings, all written out, and the same losses; only its name and its folder are others."""
    run.train("--max_steps=6", "--max_lr=0.01", "--eval_freq=3")
    before = json.loads((run.path / "config.json").read_text())
    again = tmp_path / "again"
    flags = [f"--config={run.path / 'config.json'}", f"--checkpoint_dir={again}", "--run_name=b"]
    worked(train_in_forks(flags))
    after = json.loads((again / "b" / "config.json").read_text())
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"checkpoint_dir", "run_name", "chosen"}
    assert (len(losses(run.path)), losses(again / "b")) == (6, losses(run.path))


def test_what_follows_in_a_run_s_config_json_follows_what_is_typed(run):
    """Its floor and its warm-up were derived; those that differ from the derived ones were chosen and stay."""
    run.train("--max_steps=12", "--max_lr=0.003", "--stop_after_steps=1")
    file = f"--config={run.path / 'config.json'}"

    def begun(*more: str) -> dict[str, Any]:
        command = parse([file, "--run_name=b", *more])
        return to_flat(resolve(command, world_size=1, set_aside=False).config)

    flat = begun("--max_lr=1e-4", "--max_steps=2000")
    assert (flat["min_lr"], flat["warmup_steps"]) == (1e-5, 200)
    assert (begun("--max_tokens=25600")["warmup_steps"], begun()["min_lr"]) == (20, 0.0003)
    flat = begun("--max_lr=2e-3", "--min_lr=1e-3", "--max_steps=40", "--warmup_steps=3")
    assert (flat["min_lr"], flat["warmup_steps"]) == (1e-3, 3)
    edit_json(run.path / "config.json", min_lr=0.0002, warmup_steps=2)
    flat = begun("--max_lr=2e-3", "--max_steps=2000")
    assert (flat["min_lr"], flat["warmup_steps"]) == (0.0002, 2)


def test_batch_and_rates_for_a_run_s_length_do_not_outlive_it_unless_they_were_edited():
    fitted = for_length("modern-micro", "normuon", 1e6)
    file = {"model": "modern-micro", "optimizer": "normuon", "max_tokens": 1_000_000}
    file |= {**fitted, "chosen": ["model", "max_tokens"]}
    for typed in ({"max_tokens": 4_000_000}, {"num_epochs": 2.0}, {"optimizer": "adamw"}):
        assert not read_values(file, typed=typed).keys() & fitted.keys()
    edited = read_values(file | {"max_lr": 5e-4}, typed={"max_tokens": 4_000_000})
    assert edited.keys() & fitted.keys() == {"max_lr"}
    assert read_values(file, typed={"log_freq": 5}).keys() >= fitted.keys()


def test_the_vocabulary_of_a_run_s_config_json_is_that_of_its_data(run, tiny_data, tmp_path):
    """Other data bring their own tokenizer; rows that somebody chose, and data without one, change nothing."""
    write_jsonl(tmp_path / "text" / "a.jsonl", TEXTS * 20)
    run_prepare(tmp_path / "text", tmp_path / "data", tokenizer=BYTES, val_tokens=500)
    run.train("--max_steps=2")
    path, other = run.path / "config.json", f"--data_dir={tmp_path / 'data'}"

    def vocabulary(*more: str) -> tuple[int, int]:
        model = fresh_settings(parse([f"--config={path}", *more]))[0].model
        return model.vocab_size, model.num_tokens

    assert vocabulary() == (256, 50257)
    assert vocabulary(other)[0] == 256  # somebody chose it: it is not what GPT-2's tokenizer needs
    edit_json(path, vocab_size=50304)
    assert vocabulary() == vocabulary(f"--data_dir={tiny_data}") == (50304, 50257)
    assert vocabulary(other) == (384, 257)
    assert vocabulary(other, "--vocab_size=300") == (300, 257)
    # Rows that were fitted to other data are dropped, and those that were typed stay.
    for rows, left in ((384, Config().model.vocab_size), (1024, 1024)):
        file = {"num_tokens": 300, "vocab_size": rows}
        assert make_request({"data_dir": "x"}, file=file).config.model.vocab_size == left
        assert make_request({"model": "gpt2-nano"}, file=file).config.model.vocab_size == left
    # Fine-tuning leaves the data of saved settings out; from hand they would have no effect.
    write_file(tmp_path / "a.toml", override(Config(), {"data_dir": ("x",)}), leave_out=frozenset())
    assert "data_dir" not in read_file(tmp_path / "a.toml", "finetune")
