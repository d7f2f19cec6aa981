"""A second start of the same run finds its compiled step where the first one left it."""

import os
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import launch
from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from gpt2lab.distributed import compilation
from tiny import flags_of, write_inputs


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch leaves it
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_cache_lies_in_the_users_own_apart_by_processor(home, monkeypatch):
    compilation.use_cache_folder()
    first = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert first.parent == home / ".cache" / "gpt2lab" / "compiled"
    assert first.is_dir()
    assert first.name == compilation._processor()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    compilation.use_cache_folder()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parents[2] == home / "xdg"


def test_a_users_place_is_kept_and_a_read_only_home_no_error(home, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    compilation.use_cache_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert not (home / ".cache").exists()
    (home / ".cache").write_text("a file in the way")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    compilation.use_cache_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


@pytest.mark.slow
def test_a_second_start_compiles_nothing_anew(home, tiny_run):
    """In the place that is ours, although torch has named another by the time that we look."""
    shape = ("--n_layer=1", "--n_embd=16", "--total_batch_size=64", "--max_steps=2", "--compile=on")
    *runs, broken, again = [tiny_run(*shape, "--sample_freq=0") for _ in range(4)]
    for run in runs:
        launch.worked(launch.train(run.flags))
    [first], [second] = (run.events("compile") for run in runs)
    assert first["graphs"] == second["graphs"] == 2
    assert (first["from_cache"], second["from_cache"]) == (0, 2)
    assert first["compile_seconds"] > 0
    assert (Path(first["folder"]).parents[2], runs[0].bits()) == (home / ".cache", runs[1].bits())
    library = next(Path(first["folder"]).rglob("*.main.so"))
    os.truncate(library, 0)  # as a killed compiler leaves it
    done = launch.train(broken.flags)
    assert (done.returncode, library.exists()) == (1, False)
    assert f"error: {library}: left unfinished by a compiler that was killed" in done.stderr
    launch.worked(launch.train(again.flags))


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_each_run_of_a_process_is_compiled_and_counted_by_itself(tiny_run):
    runs = [tiny_run("--n_layer=1", "--max_steps=2", f"--n_embd={width}") for width in (16, 32)]
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for run in runs:
            run.train("--compile=on")
    assert [run.events("compile")[0]["graphs"] for run in runs] == [2, 2]


WORKER = launch.WORKERS / "count_compiles.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layers", "evaluation"),
    [(1, 1, "eager"), (2, 1, "compiled"), (2, REGIONS_FROM_LAYERS, "eager")],
)
def test_the_step_is_compiled_once(world, layers, evaluation, tmp_path):
    """So is a compiled evaluation: before the first step, for one shape, though its last batch is not full.

    A deep model's step is three graphs: embeddings, the block, and the loss.
    """
    write_inputs(tmp_path, items=5)
    more = ("--max_steps=6", "--compile=on", "--sample_freq=2", "--sample_tokens=4")
    flags = flags_of(tmp_path, "run", f"--n_layer={layers}", *more)
    extra = {"COMPILE_EVALUATION": "1"} if evaluation == "compiled" else {}
    done = launch.worked(launch.train_in_forks(flags, world=world, program=WORKER, **extra))
    run = tmp_path / "runs" / "run"
    for kind in ("eval", "hellaswag", "sample"):
        assert {event["step"] for event in launch.events(run, kind)} >= {2, 4, 6}
    counts = [line for line in done.stdout.splitlines() if line.startswith("graphs")]
    graphs = (3 if layers >= REGIONS_FROM_LAYERS else 1) + (evaluation == "compiled")
    assert counts == [f"graphs after step 1: {graphs}, at the end: {graphs}"] * world
