"""Before a run: is everything there, and fast enough? GO or NO-GO, and nothing written."""

import dataclasses
import json
import os
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import launch
from gpt2lab import fmt, paths
from gpt2lab.commands import preflight
from gpt2lab.config.settings import override
from gpt2lab.distributed import processor
from gpt2lab.planner import hardware
from tiny import flip_bit, parse, resolved
from whole_run import Run, Usage

# note: no shards.json
NAMES = ["settings", "note", "disk", "memory", "data", "step", "clock", "grace"]


@pytest.fixture
def run(tiny_data, tmp_path) -> Run:
    return Run(tiny_data, tmp_path / "runs", "--max_steps=20", "--eval_freq=0")


def ask(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON answer."""
    argv = [*run.flags, *more, "--preflight", "--json"]
    monkeypatch.setattr(sys, "argv", ["src/train.py", *argv])
    capsys.readouterr()
    return preflight.preflight(parse(argv), as_json=True), json.loads(capsys.readouterr().out)


def failures(told: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["detail"] for c in told["checks"] if c["result"] == "failed"}


def test_the_command_says_go_and_writes_nothing(run):
    rows = launch.worked(launch.call(launch.TRAIN, *run.flags, "--preflight")).stdout.splitlines()
    assert [row.split()[0] for row in rows] == [*NAMES, "GO:"]
    command = rows[-1].removeprefix("GO: ")
    assert command.endswith(" ".join(["src/train.py", *run.flags]))
    assert not run.path.parent.exists()
    launch.worked(launch.call(launch.TRAIN, *command.split()[2:], "--stop_after_steps=1"))


def test_a_hardware_file_that_cannot_be_used_is_a_warning(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "own.json").write_text('{"nope": 1}')
    monkeypatch.setattr(hardware, "user_file", lambda: tmp_path / "own.json")
    hardware.load.cache_clear()
    code, told = ask(run, capsys, monkeypatch)
    (memory,) = (check for check in told["checks"] if check["name"] == "memory")
    assert (code, memory["result"]) == (0, "warning")


@pytest.mark.slow
def test_two_processes_time_the_network_and_name_torchruns_command(run):
    done = launch.worked(launch.train([*run.flags, "--preflight", "--json"], world=2))
    told = json.loads(done.stdout)
    checks = {check["name"]: check for check in told["checks"]}
    assert list(checks) == [*NAMES[:6], "network", *NAMES[6:]]
    assert told["go"] is True
    for numbers in checks["network"]["numbers"].values():
        assert len(numbers) == 2
        assert min(numbers) > 0
    assert "torchrun waits 30 s" in checks["grace"]["detail"]
    assert "--standalone --nproc_per_node=2" in told["command"]
    assert "--preflight" not in told["command"]
    assert not run.path.parent.exists()


def test_a_resume_is_tried_with_its_checkpoint(run, capsys, monkeypatch):
    run.train("--stop_after_steps=4")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    code, told = ask(run, capsys, monkeypatch, "--resume=latest")
    assert code == 0
    details = {check["name"]: check["detail"] for check in told["checks"]}
    assert "goes on from step 4" in details["settings"]
    assert details["checkpoint"] == "resumed from step 4 (bit-identical)"
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    code, told = ask(run, capsys, monkeypatch, "--resume=latest", "--n_layer=3")
    assert code == 1
    assert "another architecture" in failures(told)["settings"]


def test_too_little_disk_is_a_no_go(run, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 1_000_000))
    code, told = ask(run, capsys, monkeypatch)
    assert code == 1
    assert told["go"] is False
    [(name, detail)] = failures(told).items()
    assert name == "disk"
    assert "need 1.64 MB, 1 MB free; lower --keep_checkpoints" in detail


@pytest.mark.parametrize("damaged", ["shards.json", "tiny_train_000000.npy"])
def test_damaged_data_are_a_no_go(damaged, prepared, tmp_path, capsys, monkeypatch):
    """Of a shard, where the first batch reads it."""
    run = Run(prepared, tmp_path / "runs", "--max_steps=5", "--vocab_size=50304")
    assert ask(run, capsys, monkeypatch)[0] == 0
    flip_bit(prepared / damaged, -30)
    code, told = ask(run, capsys, monkeypatch)
    assert code == 1
    assert damaged in failures(told)["data"]


def test_a_model_too_large_for_the_memory_is_a_no_go_before_it_is_built(run, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**18, 0, 10**18))
    monkeypatch.setattr(preflight, "DISK_BYTES", 10**6)
    large = ("--n_layer=96", "--n_head=96", "--n_embd=12288")  # GPT-3: 2.8 TB
    code, told = ask(run, capsys, monkeypatch, *large)
    assert (code, list(failures(told))) == (1, ["memory"])
    assert "not even one sequence at a time" in failures(told)["memory"]
    assert told["checks"][-1]["name"] == "memory"


def test_the_memory_of_a_gpu_that_nobody_measured_is_compared_too(run, tmp_path, monkeypatch):
    row = "0, A New GPU, 20000, 10000, 600.1, GPU-1, 0, 13.0, [N/A], [N/A], [N/A]"
    launch.write_program(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{row}'\n")
    monkeypatch.setattr(processor, "build_of_torch", lambda: ("2.13.0", "12.8"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    start = resolved(run.flags)
    config = override(start.config, {"dtype": "bf16", "compile": "off"})  # as on such a machine
    runtime: Any = SimpleNamespace(device=torch.device("cuda"))
    check = preflight._memory(dataclasses.replace(start, config=config), runtime)
    assert (check.result, check.numbers["available_bytes"]) == ("ok", 10_000 * 2**20)


def test_a_stop_longer_than_the_launcher_waits_is_answered_with_the_flag(run, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
    code, told = ask(run, capsys, monkeypatch)
    assert (code, told["checks"][-1]["result"]) == (0, "warning")
    words = told["command"].split()
    place = words.index("--shutdown-timeout")
    assert int(words[place + 1]) >= 1
    assert words[place + 2] == "src/train.py"


def test_a_disk_that_returns_other_bytes_is_seen(tmp_path, monkeypatch):
    assert preflight.try_disk(tmp_path, 1_000_001)[3]
    real = os.fsync

    def spoil(descriptor: int) -> None:
        real(descriptor)
        [path] = tmp_path.glob(".gpt2lab-trial.*")
        content = bytearray(path.read_bytes())
        content[77] ^= 4
        path.write_bytes(content)

    monkeypatch.setattr(os, "fsync", spoil)
    num_bytes, *_, is_intact = preflight.try_disk(tmp_path, 1_000_001)
    assert (num_bytes, is_intact) == (1_000_001, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--dry_run", "--fit_schedule", "--mini_batch_size=auto"])
def test_what_does_not_go_together_is_rejected(run, flag):
    done = launch.call(launch.TRAIN, *run.flags, "--preflight", flag)
    assert "--preflight" in launch.rejected(done)


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("src/train.py --preflight --n_layer=1", "python src/train.py --n_layer=1"),
        ("/venv/bin/gpt2lab train --preflight --n_layer=1", "gpt2lab train --n_layer=1"),
        ("gpt2lab/__main__.py finetune --preflight", "python -m gpt2lab finetune"),
        ("gpt2lab/train.py --preflight --json", "python src/train.py"),
    ],
)
def test_the_command_after_go_has_the_form_that_was_typed(typed, command, monkeypatch):
    monkeypatch.chdir(launch.REPOSITORY)
    monkeypatch.setattr("sys.argv", typed.split())
    program, *words = command.split()
    assert preflight.command_to_start([]) == fmt.command_line([paths.program(program), *words])
