"""`import gpt2lab`: the page docs/api.md run as doctests, and what a program relies on."""

import gc
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import gpt2lab
import launch
from gpt2lab.commands import api
from gpt2lab.errors import ConfigError
from launch import REPOSITORY

DOCTEST = """
import doctest, sys
failed, tried = doctest.testfile(sys.argv[1], module_relative=False, optionflags=doctest.ELLIPSIS)
print(tried)
sys.exit(failed > 0)
"""


def run(folder: Path, *command: str) -> launch.Done:
    """Run Python in a folder with a copy of the package, as it is where gpt2lab is installed."""
    site = folder.parent / "site"
    if not site.exists():
        shutil.copytree(REPOSITORY / "src" / "gpt2lab", site / "gpt2lab")
    folder.mkdir(exist_ok=True)
    return launch.python(*command, folder=folder, PYTHONPATH=str(site))


@pytest.mark.slow
def test_the_page_of_the_api_runs(tmp_path):
    """Also where the quickstart has prepared its data."""
    page = REPOSITORY / "docs" / "api.md"
    run(tmp_path / "empty", "-m", "gpt2lab", "prepare", "python-stdlib", "--max_tokens=50K")
    done = run(tmp_path / "empty", "-c", DOCTEST, str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) == page.read_text().count("\n>>> ") > 20
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"data", "checkpoints"}


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    code = (
        "import sys, gpt2lab; assert not {'torch', 'numpy', 'argparse'} & set(sys.modules); "
        "assert set(gpt2lab.__all__) <= set(dir(gpt2lab)); "
        "gpt2lab.train, gpt2lab.load, gpt2lab.open_run; assert 'torch' not in sys.modules"
    )
    launch.worked(run(tmp_path / "empty", "-c", code))


def test_the_entry_points_do_not_hide_the_functions():
    """`gpt2lab.train` is a function to import and a module to run; importing the module would replace it."""
    with pytest.raises(ImportError, match="an entry point"):
        __import__("gpt2lab.train")
    from gpt2lab import train

    assert train is gpt2lab.train is api.train
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = gpt2lab.trian


def test_a_run_of_the_api_is_a_run_of_the_command_line(run, tmp_path):
    run.train("--max_steps=4", "--eval_freq=2")
    settings = gpt2lab.open_run(run.path).config
    found = gpt2lab.train(settings, run_name="b", log_freq=np.int64(3))
    assert found == gpt2lab.open_run("b", checkpoint_dir=tmp_path)
    assert (found.name, found.folder) == ("b", tmp_path / "b")
    assert launch.losses(found.folder) == launch.losses(run.path)
    assert found.config == {**gpt2lab.open_run(run.path).config, "run_name": "b", "log_freq": 3}
    assert [event["step"] for event in found.metrics()] == [1, 2, 3, 4]
    assert [event["step"] for event in found.metrics("eval")] == [0, 2, 4]
    assert found.metrics("hellaswag") == []
    with pytest.raises(ConfigError, match="'evals': step, eval, hellaswag, core, sample or"):
        found.metrics("evals")
    # They are taken as its config.json is: what is typed counts above it, of three units of one length too.
    tokens = 3 * settings["total_batch_size"]
    found = gpt2lab.train(settings, run_name="longer", max_tokens=tokens)
    assert [event["step"] for event in found.metrics()] == [1, 2, 3]
    assert (found.config["max_steps"], found.config["max_tokens"]) == (None, tokens)
    assert gpt2lab.train(resume=found.folder / "step_00000003") == found


def test_training_leaves_no_thread_and_needs_the_main_one(run):
    run.train("--max_steps=2")
    settings = gpt2lab.open_run(run.path).config
    with (
        ThreadPoolExecutor(1) as another,
        pytest.raises(ConfigError, match="train works in the main thread only"),
    ):
        another.submit(gpt2lab.train, settings, run_name="b").result()
    before = set(threading.enumerate())
    torch.set_deterministic_debug_mode("warn")
    gpt2lab.train(settings, run_name="c")
    assert torch.get_deterministic_debug_mode() == 1, "the caller's"
    gc.collect()
    assert "shard verifier" not in [one.name for one in set(threading.enumerate()) - before]


def test_a_model_takes_one_text_that_fits(run, monkeypatch):
    run.train("--max_steps=1", "--vocab_size=50304", "--sample_freq=0")
    model = gpt2lab.load(run.path)
    alone, encode = model.generate("a", max_new_tokens=5), model._encode

    def encode_after_another(text: str) -> list[int]:
        """Generate with other settings first, as another thread may."""
        monkeypatch.undo()
        model.generate("b", max_new_tokens=1)
        return encode(text)

    monkeypatch.setattr(model, "_encode", encode_after_another)
    assert model.generate("a", max_new_tokens=5) == alone
    model.logits("a").mul_(0.5)
    long = "word " * (model.config.context_length + 1)
    with pytest.raises(ConfigError, match="top_k 'a' is not a whole number"):
        model.generate("a", top_k="a")  # type: ignore[arg-type]
    for call in (model.generate, model.logits, model.loss):
        with pytest.raises(ConfigError, match=r"the text has \d+ tokens"):
            call(long)
        with pytest.raises(ConfigError, match=r"text \['a', 'b'\] is not a string"):
            call(["a", "b"])  # type: ignore[arg-type]


def test_what_an_api_call_cannot_mean_is_rejected(tmp_path):
    for call, says in (
        (lambda: gpt2lab.train({1: 2}), "unknown setting 1"),
        (lambda: gpt2lab.train({"n_leyer": 2}), "unknown setting n_leyer: did you mean n_layer"),
        (lambda: gpt2lab.train(n_layer="two"), "n_layer 'two' is not a whole number"),
        (lambda: gpt2lab.train(max_lr=float("nan")), "max_lr nan is not a number"),
        (lambda: gpt2lab.train(lora_r=4), "--lora_r is for fine-tuning, gpt2lab finetune"),
        (lambda: gpt2lab.train({"data_dir": "x"}, instructions="demo"), "--data_dir is for pretra"),
        (lambda: gpt2lab.train(instructions="demo", max_source_epochs="1"), "--max_source_epochs"),
        (lambda: gpt2lab.train(allow_change="max_lr"), "--allow_change goes with --resume"),
        (lambda: gpt2lab.train(resume="auto", allow_change="max_lt"), "max_lt: no such setting"),
        (lambda: gpt2lab.prepare("x", val_token=1), "prepare takes no val_token: did you mean"),
        (lambda: gpt2lab.estimate(gpuz=2), "estimate takes no gpuz: did you mean gpu"),
        (lambda: gpt2lab.estimate(model="gpt3"), "model 'gpt3' is not gpt2 or "),
        (lambda: gpt2lab.estimate(gpus="8"), "gpus '8' is not a whole number"),
        (lambda: gpt2lab.estimate(data_dir=5), "data_dir 5 is not text"),
        (lambda: gpt2lab.prepare("x", max_tokens="400K"), "max_tokens '400K' is not a whole"),
        (lambda: gpt2lab.prepare("x", out=5), "out 5 is not text"),  # type: ignore[arg-type]
        (lambda: gpt2lab.train(5), "5 is no path"),  # type: ignore[arg-type]
        (lambda: gpt2lab.train(resume=5), "resume 5 is not text"),  # type: ignore[arg-type]
        (lambda: gpt2lab.load("x", device="gpu"), "device 'gpu' is not"),  # type: ignore[arg-type]
        (lambda: gpt2lab.open_run("x", checkpoint_dir=5), "5 is no path"),  # type: ignore[arg-type]
        (lambda: gpt2lab.open_run("none", checkpoint_dir=tmp_path), "no run of this name"),
        (lambda: gpt2lab.open_run(tmp_path), "without a log or checkpoints is no run"),
    ):
        with pytest.raises(ConfigError, match=says):
            call()
