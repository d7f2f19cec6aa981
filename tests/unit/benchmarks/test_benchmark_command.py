"""gpt2lab benchmark: every way that is compared does the same work, and the numbers are those of the table."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import plant_bugs, sharing, step_overhead
from benchmarks.cuda_codegen import report
from gpt2lab.config.presets import preset
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import checkpoint_bytes
from launch import HANG_SECONDS, REPOSITORY, call, environment, script, worked
from ranks import run_ranks


def test_every_planted_bug_has_its_place_and_its_tests():
    for tests, bugs in plant_bugs.read_bugs(plant_bugs.BUGS.read_text()).values():
        for bug in bugs:
            source = (REPOSITORY / bug.file).read_text()
            assert bug.plant(source) != source
        for name in {*tests, *(test for bug in bugs for test in bug.tests)}:
            assert (REPOSITORY / name.partition("::")[0]).exists(), name


@pytest.mark.slow
def test_preparation_and_loading_side_by_side(tmp_path):
    words = ["--megabytes", 2, "--rounds", 1, "--num_workers", 1, 2, "--json", tmp_path / "d.json"]
    said = worked(script("benchmark", "data", *words)).stdout
    numbers = json.loads((tmp_path / "d.json").read_text())
    rates = numbers["preparation"]["tokens_per_second"]
    ways = {f"{way}, {n} processes" for way in ("gpt2lab", "tutorial") for n in (1, 2)}
    assert set(rates) == {"tiktoken, one thread"} | ways
    for rate in rates.values():
        assert f"{rate['median']:,.0f}" in said
    assert numbers["preparation"]["times_tiktoken"]["tiktoken, one thread"] == 1
    assert set(numbers["loader"]) == {"shards", "windows"}


def in_forks(worker: Path, words: list[str], *, processes: int, threads: int) -> Any:
    """Run a program as `sharing.run_worker` does, without the seconds of its start."""
    how = {"environment": environment(), "seconds": HANG_SECONDS}
    done = worked(run_ranks(worker, words, world=processes, **how))
    return json.loads(done.stdout.partition("result ")[2].partition("\n")[0])


@pytest.mark.slow
def test_parallel_modes_side_by_side(tmp_path, monkeypatch):
    """The ranks are forks; the test below starts them as torchrun does."""
    monkeypatch.setattr(sharing, "run_worker", in_forks)
    words = ["--model", "gpt2-nano", "--micro_batch", 1, "--micro_steps", 2, "--steps", 1]
    words += ["--json", tmp_path / "p.json"]
    said = worked(call("benchmark", "parallel", *words)).stdout
    numbers = json.loads((tmp_path / "p.json").read_text())
    alone = numbers["alone"][0]["losses"]
    assert set(numbers["modes"]) == {"ddp", "zero1", "fsdp"}
    for mode, run in numbers["modes"].items():
        assert run["losses"] == pytest.approx(alone, rel=1e-5), mode
        assert alone[1] < alone[0]
        for kind, expected in run["expected_bytes"].items():
            assert run["bytes"][kind] == pytest.approx(expected, rel=1e-4), (mode, kind)
        assert f"| {mode} | {run['tokens_per_second']:,.0f} |" in said


@pytest.mark.slow
def test_the_cpus_work_outside_the_model_mode_by_mode(tmp_path, monkeypatch):
    """The first mode's ranks are started as torchrun does, the others are forks."""
    ways = iter([step_overhead.run_worker])
    monkeypatch.setattr(step_overhead, "run_worker", lambda *a, **k: next(ways, in_forks)(*a, **k))
    words = ["--layers", 1, 3, "--steps", 2, "--mode", "ddp", "zero1"]
    words += ["--json", tmp_path / "o.json"]
    said = worked(call("benchmark", "step-overhead", *words)).stdout
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    modes = [(mode, 4 + 12 * layers) for layers in (1, 3) for mode in ("ddp", "zero1")]
    assert [(row["mode"], row["parameters"]) for row in rows] == modes
    by_layers = [row["operators_after"] for row in rows if row["mode"] == "zero1"]
    assert by_layers[0] == by_layers[1]
    by_layers = [row["operators_before"] for row in rows if row["mode"] == "ddp"]
    assert by_layers[1] - by_layers[0] == 2 * 4  # the norm of a matrix is one, vectors are joined
    for row in rows:
        assert row["after_ms"] > 0
        assert f"| {row['mode']} | {row['parameters']} | {row['before_ms']:.2f} |" in said


@pytest.mark.slow
def test_saves_side_by_side(tmp_path):
    """Each way writes weights and both moments once, and nothing stays behind."""
    words = ["--model", "gpt2-nano", "--rounds", 2, "--folder", tmp_path]
    said = worked(script("benchmark", "save", *words, "--json", tmp_path / "s.json")).stdout
    numbers = json.loads((tmp_path / "s.json").read_text())
    tensor_bytes = checkpoint_bytes(preset("gpt2-nano"))
    for way in ("gpt2lab", "gpt2lab, async", "torch.save", "torch.save, flushed"):
        assert tensor_bytes < numbers["bytes"][way] < 1.02 * tensor_bytes
        assert len(numbers["seconds"][way]) == 2
        assert way in said
    assert numbers["times_torch_save"]["torch.save"] == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


@pytest.mark.slow
def test_predictions_beside_what_was_measured(tmp_path):
    words = ["--probe_steps", 1, "--steps", 1, "--json", tmp_path / "p.json"]
    code, said, error = call("benchmark", "planner", *words)
    assert code == 0, error
    numbers = json.loads((tmp_path / "p.json").read_text())
    assert [len(numbers[kind]) for kind in ("probed", "fitted")] == [6, 20]
    for row in numbers["probed"] + numbers["fitted"]:
        assert row["error"] == pytest.approx(row["predicted_seconds"] / row["actual_seconds"] - 1)
        assert row["predicted_seconds"] > 0
        assert f"| {row['case']} |" in said


WRONG = (
    *("", "cpus", "data --rounds 0", "data --num_workers 0", "data --json nowhere/x.json"),
    *("parallel --processes 1", "parallel --processes 9999", "parallel --steps 0"),
    *("codegen-parallel --layers 0", "step-overhead --processes 1", "step-overhead --layers 0"),
    *("step-overhead --mode zero2", "hellaswag --hellaswag_path nowhere.jsonl"),
    *("planner --steps 0", "save --folder /nowhere", "cpu --steps 0", "cpu --total_seconds 0"),
    *("cpu --variant slash", "cpu --model mid --variant micro_double", "cpu --peer nonogpt=/tmp"),
    *("cpu --peer nanogpt", "cpu --peer nanogpt=/nowhere", "cpu --peer litgpt=scripts"),
    *("cpu --peer hf=scripts", "cpu --dtype fp16", "codegen --layers 4 2"),
    *("codegen --micro_batch 0", "codegen --ddp_bucket_mb 0.5", "sample --model gpt2-nano"),
    *(() if torch.cuda.is_available() else ("gpu --peer hf",)),
)


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_one_line(words, wording):
    code, said, error = call("benchmark", *words.split(), folder=REPOSITORY)
    assert (code, said) == (2, "")
    wording(re.sub("this machine has .*", "this machine has", error.splitlines()[-1]))


def test_code_for_a_gpu_needs_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install triton==3.7.1"):
        report.generate("sm_90", [])
