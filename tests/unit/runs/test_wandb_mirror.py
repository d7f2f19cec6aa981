"""`--use_wandb`: what the mirror shows, and that no way in which it can fail touches the run."""

from __future__ import annotations

import importlib.util
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

import launch
from ecosystem import works_with
from gpt2lab.config.command_line import parse
from gpt2lab.runs import wandb_mirror
from gpt2lab.training.pretrain import pretrain
from whole_run import SCALARS

# What a stand-in for the library does; `{}` is the file that it writes down what it was asked in.
RECORDS = """
import json
class Run:
    def define_metric(self, *a, **k): pass
    def log(self, values): self.file.write(json.dumps(values) + chr(10)); self.file.flush()
    def finish(self): self.file.write(json.dumps("finished") + chr(10)); self.file.close()
def init(**options):
    run = Run()
    run.file = open({!r}, "w")
    run.file.write(json.dumps(options) + chr(10))
    return run
"""
FAILS = {
    "raises when it is imported": "raise RuntimeError('no good')",
    "raises at its start": "def init(**_): raise RuntimeError('no good')",
    "ends its process": "import os, sys\ndef init(**_): print('no good', flush=True); os._exit(3)",
    "raises in the middle": RECORDS
    + "def log(self, values): raise RuntimeError('no good')\nRun.log = log",
    "raises at its end": RECORDS
    + "def finish(self): raise RuntimeError('no good')\nRun.finish = finish",
}
HANGS = {
    "hangs when it is imported": "import time; time.sleep(600)",
    "hangs and hears no signal": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "def init(**_): time.sleep(600)"
    ),
    "hangs at its end": RECORDS + "import time\nRun.finish = lambda self: time.sleep(600)",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> tuple[list[str], Path]:
    """Return flags and the folder of a run without the mirror."""
    runs = tmp_path_factory.mktemp("runs")
    flags = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16", "--device=cpu"]
    flags += ["--total_batch_size=64", "--mini_batch_size=2", "--val_tokens=320", "--compile=off"]
    flags += [f"--data_dir={tiny_data}", "--dtype=fp32", "--max_steps=4", "--eval_freq=2"]
    flags += ["--sample_freq=2", "--sample_tokens=2"]
    pretrain(parse([*flags, f"--checkpoint_dir={runs}", "--run_name=r"]))
    return flags, runs / "r"


def train(
    plain: tuple[list[str], Path],
    tmp_path: Path,
    stand_in: str,
    patch: pytest.MonkeyPatch,
    patience: float = 60.0,
) -> Path:
    """Train with a stand-in for the library and return the run's folder."""
    (tmp_path / "wandb.py").write_text(stand_in.replace("{!r}", repr(str(tmp_path / "said"))))
    patch.setenv("PYTHONPATH", str(tmp_path))
    patch.setattr(wandb_mirror, "is_installed", lambda: True)
    patch.setattr("gpt2lab.runs.logger.is_installed", lambda: True)
    patch.setattr(wandb_mirror, "_FINISH_SECONDS", patience)
    pretrain(parse([*plain[0], f"--checkpoint_dir={tmp_path}", "--run_name=r", "--use_wandb"]))
    return tmp_path / "r"


def assert_untouched(run_dir: Path, plain: tuple[list[str], Path]) -> None:
    assert launch.losses(run_dir) == launch.losses(plain[1])
    assert launch.parameter_hash(run_dir, 4) == launch.parameter_hash(plain[1], 4)
    assert json.loads((run_dir / "status.json").read_text())["state"] == "completed"


def test_the_mirror_shows_what_tensorboard_shows(
    plain: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = train(plain, tmp_path, RECORDS, monkeypatch)
    options, *logged, end = map(json.loads, (tmp_path / "said").read_text().splitlines())
    assert end == "finished"
    assert (options["group"], options["name"]) == ("r", "r start 1")
    assert options["config"]["n_embd"] == 16
    for tag, (kind, field, factor) in SCALARS.items():
        expected = {
            event["step"]: event[field] * factor
            for event in launch.events(run_dir, kind)
            if event[field] is not None
        }
        assert {line["training_step"]: line[tag] for line in logged if tag in line} == expected
    texts = [line["Generated_Samples/text"] for line in logged if "Generated_Samples/text" in line]
    assert texts == [event["text"] for event in launch.events(run_dir, "sample")]
    assert_untouched(run_dir, plain)
    assert "wandb" not in json.dumps(launch.events(run_dir, "warning"))


@pytest.mark.parametrize("way", FAILS)
def test_a_failing_mirror_is_said_and_touches_nothing(
    plain: tuple[list[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: str,
) -> None:
    run_dir = train(plain, tmp_path, FAILS[way], monkeypatch)
    assert_untouched(run_dir, plain)
    said = [line for line in capsys.readouterr().out.splitlines() if "W&B" in line]
    assert len(said) == 1, said
    assert "no good" in said[0]
    assert said[0] in (run_dir / "log.txt").read_text()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("hangs when it is imported", marks=pytest.mark.slow),
        "hangs and hears no signal",
        pytest.param("hangs at its end", marks=pytest.mark.slow),
    ],
)
def test_a_hanging_mirror_is_left_behind_and_does_not_live_on(
    plain: tuple[list[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: str,
) -> None:
    began: list[int] = []
    start = wandb_mirror.subprocess.Popen

    def noted(*args: object, **options: object) -> object:
        process = start(*args, **options)  # type: ignore[call-overload]
        if "gpt2lab.runs.wandb_mirror" in args[0]:  # type: ignore[operator]
            began.append(process.pid)
        return process

    monkeypatch.setattr(wandb_mirror.subprocess, "Popen", noted)
    run_dir = train(plain, tmp_path, HANGS[way], monkeypatch, patience=3.0)
    assert_untouched(run_dir, plain)
    assert "W&B did not take the rest within 3 s" in capsys.readouterr().out
    (pid,) = began
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_library_that_is_missing_is_said_and_the_run_goes_on(
    plain: tuple[list[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gpt2lab.runs.logger.is_installed", lambda: False)
    pretrain(parse([*plain[0], f"--checkpoint_dir={tmp_path}", "--run_name=r", "--use_wandb"]))
    assert (
        "warning: no mirror at W&B: it is not installed: pip install wandb"
        in capsys.readouterr().err
    )
    assert_untouched(tmp_path / "r", plain)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_library_itself_takes_it_offline(
    plain: tuple[list[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    works_with("wandb", version("wandb"), "--use_wandb, offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb_mirror, "_FINISH_SECONDS", 120.0)
    pretrain(parse([*plain[0], f"--checkpoint_dir={tmp_path}", "--run_name=r", "--use_wandb"]))
    assert "warning: W&B" not in capsys.readouterr().out
    assert_untouched(tmp_path / "r", plain)
    (file,) = (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"Loss/train" in content
    assert b"Generated_Samples/text" in content
