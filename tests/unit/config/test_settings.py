"""Settings as values: what cannot work, their flat form, versions."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2lab.config.presets import PRESETS, preset
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import LEAVES, find_problems, is_path, override, read_settings, to_flat
from gpt2lab.errors import ConfigError

PROBLEMS: list[dict[str, Any]] = [
    *({"n_head": 5}, {"n_head": 0}, {"n_layer": 0}, {"context_length": 0}, {"vocab_size": 1}),
    *({"mini_batch_size": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"seed": -1}, {"seed": 2**32}),
    *({"max_lr": 0.0}, {"max_lr": math.inf}, {"grad_clip": math.inf}, {"min_lr": 1.0}),
    *({"min_lr": -1.0}, {"weight_decay": -0.1}, {"wsd_decay": 0.0}, {"warmup_steps": -1}),
    *({"max_steps": 0}, {"num_epochs": 0.0}, {"max_steps": 1, "num_epochs": 1.0}),
    *({"eval_freq": -1}, {"log_freq": 0}, {"keep_checkpoints": 0}),
    *({"run_name": "a/b"}, {"run_name": ".hidden"}, {"run_name": ""}),
    *({"beta1": 1.0}, {"beta2": 1.0}, {"muon_lr": 0.0}, {"head_lr": 0.1}, {"norm_eps": 0.0}),
    *({"lora_r": 4}, {"logit_cap": -1.0}, {"n_embd": 9, "n_head": 3, "positions": "rotary"}),
    {"n_embd": 18, "n_head": 3, "positions": "half_rotary"},
    # größe, as Python reads it where the locale is ASCII
    {"run_name": "gr\udcc3\udcb6\udcc3\udc9fe"},
]


@pytest.mark.parametrize("values", PROBLEMS, ids=str)
def test_a_setting_that_cannot_work_is_one_problem_with_its_value(values, wording):
    (found,) = find_problems(override(Config(), values))
    wording(found)


def test_the_defaults_and_every_preset_have_no_problem():
    for name in PRESETS:
        assert find_problems(preset(name)) == []
    assert find_problems(Config()) == []
    edges = {"wsd_decay": 1.0, "seed": 2**32 - 1, "beta1": 0.0, "beta2": 0.0}
    assert find_problems(override(Config(), edges)) == []
    assert preset("modern-small", optimizer="adamw").optim.muon_lr is None


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    **{"n_layer": st.integers(1, 99), "max_lr": st.floats(1e-6, 1.0)},
    **{"min_lr": st.none() | st.floats(0, 1e-6), "num_epochs": st.none() | st.floats(0.1, 9)},
    "data_dir": st.sampled_from(["/a/b", "c"]),
    "hellaswag_path": st.none() | st.just("/h.jsonl"),
    "run_name": st.none() | st.text(min_size=1),
    "use_tensorboard": st.booleans(),
    "shuffle": st.sampled_from(["shards", "windows", "none"]),
    "model": st.sampled_from(sorted(PRESETS)),
}


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_flat_values_put_over_the_defaults_are_the_config_again(changes):
    config = override(Config(), changes)
    flat = to_flat(config)
    assert ({name: flat[name] for name in changes}, override(Config(), flat)) == (changes, config)
    untouched = to_flat(Config())
    assert all(flat[name] == untouched[name] for name in LEAVES if name not in changes)


def test_paths_are_paths_in_the_config_and_a_setting_of_another_version_is_rejected_by_name():
    path_names = {name for name in LEAVES if is_path(name)}
    assert path_names == {"data_dir", "hellaswag_path", "core", "checkpoint_dir"}
    config = override(Config(), {"hellaswag_path": "x"})
    assert (config.eval.hellaswag_path, to_flat(config)["hellaswag_path"]) == (Path("x"), "x")
    assert read_settings({"run_name": "-x"}) == override(Config(), {"run_name": "-x"})
    with pytest.raises(ConfigError, match="unknown settings n_leyer, quux: written by another"):
        override(Config(), {"n_layer": 3, "quux": 1, "n_leyer": 2})
