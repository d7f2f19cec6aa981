"""A second start of the same run finds its compiled step where the first one left it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import launch
from gpt2lab.distributed import compilation


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch leaves it
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_cache_lies_in_the_users_own_apart_by_processor(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation.use_cache_folder()
    first = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert first.parent == home / ".cache" / "gpt2lab" / "compiled"
    assert first.is_dir()
    assert first.name == compilation._processor()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    compilation.use_cache_folder()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parents[2] == home / "xdg"


def test_a_place_of_the_users_choice_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    compilation.use_cache_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert not (home / ".cache").exists()


def test_a_home_that_cannot_be_written_to_is_no_error(home: Path) -> None:
    (home / ".cache").write_text("a file in the way")
    compilation.use_cache_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


@pytest.mark.slow
def test_a_second_start_compiles_nothing_anew(home: Path, tiny_data: Path, tmp_path: Path) -> None:
    """In the place that is ours, although torch has named another by the time that we look."""
    for name in ("first", "second"):
        done = launch.train(
            [
                *("--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16"),
                *("--vocab_size=256", "--total_batch_size=64", "--mini_batch_size=2"),
                *("--max_steps=2", "--val_tokens=320", "--sample_freq=0", "--device=cpu"),
                *("--dtype=fp32", "--compile=on", f"--data_dir={tiny_data}"),
                *(f"--checkpoint_dir={tmp_path}", f"--run_name={name}"),
            ]
        )
        assert done.returncode == 0, done.stderr
        assert "graphs from the cache" in done.stdout
    [first], [second] = (launch.events(tmp_path / n, "compile") for n in ("first", "second"))
    assert first["graphs"] == second["graphs"] == 2
    assert (first["from_cache"], second["from_cache"]) == (0, 2)
    assert first["compile_seconds"] > 0
    assert Path(first["folder"]).parents[2] == home / ".cache"
    assert launch.losses(tmp_path / "first") == launch.losses(tmp_path / "second")
