"""The same curve and the same checkpoints, whatever each process holds and whatever is computed twice."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import launch
from gpt2lab.config.schema import ActivationCheckpointing, ModelConfig, Parallel, SystemConfig
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError
from gpt2lab.model.activation_checkpointing import apply_activation_checkpointing
from gpt2lab.model.counts import count_parameters
from gpt2lab.model.gpt import build_model
from gpt2lab.planner.communication import step_bytes
from gpt2lab.training.resolve import resolve
from tiny import parse, pretrain

STEPS = 20
WORKERS = Path(__file__).parents[2] / "workers"
# 257 rows of the embedding, which two processes cannot share evenly.
MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=257)
Runs = Callable[..., tuple[Path, dict[str, Any]]]


def flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16", "--vocab_size=257"),
        *("--total_batch_size=128", "--mini_batch_size=2", f"--max_steps={STEPS}"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--val_tokens=320", "--eval_freq=10"),
        "--checkpoint_freq=5",
        *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=run", *more),
    ]


def train(
    data: Path, folder: Path, *more: str, world: int, program: Path = launch.TRAIN
) -> subprocess.CompletedProcess[str]:
    done = launch.train_in_forks(flags(data, folder, *more), world=world, program=program)
    assert done.returncode == 0, done.stderr
    return done


def assert_same_curve(run: Path, reference: Path) -> None:
    found, expected = launch.current_steps(run), launch.current_steps(reference)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step, event in found.items():
        assert event["batch_hash"] == expected[step]["batch_hash"]
        assert event["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
        assert event["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-4)
    here, there = ({e["step"]: e for e in launch.events(r, "eval")} for r in (run, reference))
    assert sorted(here) == sorted(there) == [0, 10, 20]
    for step in here:
        assert here[step]["val_loss"] == pytest.approx(there[step]["val_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def alone(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    pretrain(parse(flags(tiny_data, folder)))
    return folder / "run"


@pytest.fixture(scope="module")
def by_two(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the run of two processes in a mode, and what the collectives of its last step carried."""
    known: dict[tuple[str, str], tuple[Path, dict[str, Any]]] = {}

    def run(mode: str, optimizer: str = "adamw") -> tuple[Path, dict[str, Any]]:
        if (mode, optimizer) not in known:
            folder = tmp_path_factory.mktemp(mode)
            words = (f"--parallel={mode}", f"--optimizer={optimizer}")
            counter = WORKERS / "count_traffic.py"
            said = train(tiny_data, folder, *words, world=2, program=counter).stdout
            counted = [json.loads(line[8:]) for line in said.splitlines() if line[:8] == "counted "]
            assert len(counted) == 2
            known[mode, optimizer] = folder / "run", counted[0]
        return known[mode, optimizer]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp"])
def test_two_processes_train_as_one(mode: str, by_two: Runs, alone: Path) -> None:
    run, _ = by_two(mode)
    assert_same_curve(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_zero1_trains_as_ddp_bit_by_bit(optimizer: str, by_two: Runs) -> None:
    """The update of a number, or of a matrix, needs no other one, so who makes it cannot matter."""
    one, other = by_two("ddp", optimizer)[0], by_two("zero1", optimizer)[0]
    assert launch.losses(one) == launch.losses(other)
    files = [
        json.loads((run / f"step_{STEPS:08d}" / "manifest.json").read_text())["files"]
        for run in (one, other)
    ]
    for name in ("model.safetensors", "optim.safetensors"):
        assert files[0][name]["sha256"] == files[1][name]["sha256"], name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_gradients_travel_once_a_step_with_the_last_micro_batch(mode: str, by_two: Runs) -> None:
    """Two micro-batches: nothing is sent before or in the first, then each gradient once, and the loss."""
    _, counted = by_two(mode)
    assert counted["begun"] == [{}, {}]
    assert counted["bytes"]["all_reduce"] == 4 * count_parameters(MODEL) + 4
    assert "reduce_scatter" not in counted["calls"]
    padded = 4 * (count_parameters(MODEL) + MODEL.n_embd)  # the embedding's 258th row
    assert counted["bytes"].get("all_gather", 0) == (padded if mode == "zero1" else 0)


@pytest.mark.slow
def test_fsdp_sends_blocks_for_each_micro_batch_and_the_rest_once(by_two: Runs) -> None:
    _, counted = by_two("fsdp")
    # Two blocks: their weights twice, their gradients once. The rest is gathered in the first micro-batch, and stays
    # whole until its gradients have been summed in the last.
    first = {"all_gather": 4 + 1, "reduce_scatter": 2}
    assert counted["begun"] == [{}, first]
    assert counted["calls"] == {"all_gather": 8 + 1, "reduce_scatter": 4 + 1, "all_reduce": 2}
    padded = 4 * (count_parameters(MODEL) + MODEL.n_embd)
    C = MODEL.n_embd
    blocks = 4 * MODEL.n_layer * (12 * C * C + 13 * C)
    assert counted["bytes"]["reduce_scatter"] == padded + blocks
    assert counted["bytes"]["all_gather"] == padded + 3 * blocks
    assert counted["bytes"]["all_reduce"] == 4 + 8  # the loss in fp32, the norm's square in fp64


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp"])
def test_the_planner_computes_what_travels(mode: Parallel, by_two: Runs) -> None:
    """Up to the embedding's 258th row, at most twice, and the loss and the norm."""
    _, counted = by_two(mode)
    computed = step_bytes(MODEL, parallel=mode, accumulation=2, on_gpu=False)
    for kind, size in counted["bytes"].items():
        assert 0 <= size - computed.get(kind, 0) <= 2 * 4 * MODEL.n_embd + 8, kind


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
def test_a_resume_in_the_same_mode_keeps_every_bit(
    mode: str, by_two: Runs, tiny_data: Path, tmp_path: Path
) -> None:
    run, expected = tmp_path / "run", by_two(mode)[0]
    shutil.copytree(expected, run)
    train(tiny_data, tmp_path, "--resume=5", world=2)  # the mode is remembered
    assert launch.steps(run)[20]["attempt"] == 2
    assert launch.losses(run) == launch.losses(expected)
    assert launch.parameter_hash(run, STEPS) == launch.parameter_hash(expected, STEPS)
    assert [event["level"] for event in launch.events(run, "resume")] == ["bit-identical"]


@pytest.mark.slow
def test_gathering_in_bf16_changes_no_bit_of_a_step_and_halves_what_is_gathered(
    tmp_path: Path,
) -> None:
    """With adapters, Muon and recomputation too; see workers/gathers.py for what is compared."""
    done = launch.train_in_forks([str(tmp_path)], world=2, program=WORKERS / "gathers.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all compared") == 2


@pytest.mark.slow
def test_a_run_goes_on_in_the_other_precision_of_gathering_where_that_is_allowed(
    tiny_data: Path, tmp_path: Path
) -> None:
    how = ("--dtype=bf16", "--parallel=fsdp", "--mini_batch_size=4", "--sample_freq=10")
    counter, in_bf16 = WORKERS / "count_traffic.py", "--fsdp_param_dtype=bf16"
    for name, more in (("fp32", ()), ("bf16", (in_bf16,))):
        train(tiny_data, tmp_path / name, *how, *more, world=2, program=counter)
    expected, run = tmp_path / "fp32" / "run", tmp_path / "bf16" / "run"
    assert launch.losses(run) == launch.losses(expected)
    assert launch.parameter_hash(run, STEPS) == launch.parameter_hash(expected, STEPS)
    for one, other in zip(launch.events(run, "eval"), launch.events(expected, "eval"), strict=True):
        assert one["val_loss"] == other["val_loss"]

    back = ("--resume=5", "--fsdp_param_dtype=fp32")
    with pytest.raises(ConfigError, match="fsdp_param_dtype bf16 -> fp32"):
        words = flags(tiny_data, tmp_path / "bf16", *how, *back)
        resolve(parse(words), world_size=2, set_aside=False)
    allow = "--allow_change=fsdp_param_dtype"
    train(tiny_data, tmp_path / "bf16", *how, *back, allow, world=2, program=counter)
    assert [event["level"] for event in launch.events(run, "resume")] == ["changed"]
    assert launch.losses(run) == launch.losses(expected)
    assert launch.parameter_hash(run, STEPS) == launch.parameter_hash(expected, STEPS)


@pytest.mark.slow
def test_a_run_wanders_through_modes_and_worlds(
    alone: Path, by_two: Runs, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 x ddp, 4 x fsdp, one process, 2 x zero1, each resumed from the one before."""
    run = tmp_path / "run"
    shutil.copytree(by_two("ddp")[0], run)
    fsdp = ("--parallel=fsdp", "--activation_checkpointing=block", "--mini_batch_size=1")
    train(tiny_data, tmp_path, "--resume=5", *fsdp, "--stop_after_steps=10", world=4)
    pretrain(parse([*flags(tiny_data, tmp_path), "--resume=latest", "--stop_after_steps=15"]))
    said = capsys.readouterr()
    assert "parallel fsdp -> ddp" in said.out + said.err
    train(tiny_data, tmp_path, "--resume=latest", "--parallel=zero1", world=2)
    assert [event["step"] for event in launch.events(run, "resume")] == [5, 10, 15]
    assert_same_curve(run, alone)


@pytest.mark.slow
def test_normuon_wanders_through_modes_and_worlds(
    by_two: Runs, tiny_data: Path, tmp_path: Path
) -> None:
    """2 x ddp, 4 x fsdp, one process, 2 x zero1: the owners of matrices change, momentum and averages go along."""
    muon, run = "--optimizer=normuon", tmp_path / "run"
    pretrain(parse([*flags(tiny_data, tmp_path / "alone"), muon]))
    shutil.copytree(by_two("ddp", "normuon")[0], run)
    fsdp = ("--parallel=fsdp", "--mini_batch_size=1", "--stop_after_steps=10")
    train(tiny_data, tmp_path, muon, "--resume=5", *fsdp, world=4)
    pretrain(parse([*flags(tiny_data, tmp_path), muon, "--resume=latest", "--stop_after_steps=15"]))
    train(tiny_data, tmp_path, muon, "--resume=latest", "--parallel=zero1", world=2)
    assert [event["step"] for event in launch.events(run, "resume")] == [5, 10, 15]
    assert_same_curve(run, tmp_path / "alone" / "run")


@pytest.mark.slow
def test_steps_norms_rejections_and_files_are_those_of_ddp(tmp_path: Path) -> None:
    """Of weights whose rows no number of processes divides; see workers/modes.py for what is compared.

    "fsdp offloaded" is what --fsdp_offload does on a GPU: here it moves nothing, but takes the same way.
    """
    done = launch.train_in_forks([str(tmp_path)], world=3, program=WORKERS / "modes.py")
    assert done.returncode == 0, done.stderr
    for mode in ("zero1", "zero1 scattered", "fsdp", "fsdp offloaded"):
        for optimizer in ("adamw", "muon", "normuon"):
            assert done.stdout.count(f"{mode} agrees with {optimizer}") == 3


@pytest.mark.slow
def test_evaluation_hellaswag_and_samples_are_those_of_one_process(
    tiny_data: Path, tmp_path: Path
) -> None:
    # A copy: what was tokenized is kept beside the items.
    items = tmp_path / "items.jsonl"
    shutil.copy(Path(__file__).parents[2] / "golden" / "hellaswag_items.jsonl", items)
    more = (
        *("--vocab_size=50304", "--max_steps=2", f"--hellaswag_path={items}", "--eval_freq=1"),
        *("--hellaswag_limit=8", "--hellaswag_freq=1", "--sample_freq=1", "--sample_tokens=8"),
    )
    train(tiny_data, tmp_path / "alone", *more, world=1)
    train(tiny_data, tmp_path / "fsdp", *more, "--parallel=fsdp", world=2)
    for kind, keys in (
        ("eval", ("val_loss", "val_tokens")),
        ("hellaswag", ("acc", "acc_norm", "n")),
        ("sample", ("text",)),
    ):
        one, other = (launch.events(tmp_path / name / "run", kind) for name in ("alone", "fsdp"))
        assert len(one) == len(other) > 0, kind
        for mine, theirs in zip(one, other, strict=True):
            for key in keys:
                expected = theirs[key] if key == "text" else pytest.approx(theirs[key], rel=1e-5)
                assert mine[key] == expected, (kind, key)


@pytest.mark.slow
def test_exact_reduction_keeps_its_promise_under_zero1(tiny_data: Path, tmp_path: Path) -> None:
    exact = ("--reduce=exact", "--mini_batch_size=1")
    train(tiny_data, tmp_path / "one", *exact, world=1)
    train(tiny_data, tmp_path / "two", *exact, "--parallel=zero1", world=2)
    hashes = {launch.parameter_hash(tmp_path / name / "run", STEPS) for name in ("one", "two")}
    assert len(hashes) == 1


@pytest.mark.slow
def test_compiled_and_recomputing_processes_agree_with_a_plain_one(
    alone: Path, tiny_data: Path, tmp_path: Path
) -> None:
    more = ("--compile=on", "--activation_checkpointing=selective", "--parallel=fsdp")
    train(tiny_data, tmp_path, *more, world=2)
    assert_same_curve(tmp_path / "run", alone)


class Operators(TorchDispatchMode):
    """Records the names of the operators that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def check_that_buckets_are_cleared() -> None:
    model = build_model(MODEL, seed=1, device=torch.device("cpu"))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    ddp(ids, ids).backward()
    before = [parameter.grad for parameter in model.parameters()]
    with Operators() as ran:
        Strategy(Runtime(), SystemConfig()).clear_gradients(ddp)
    assert [name for name in ran.names if "zero" in name] == ["aten::_foreach_zero_"]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient, "no longer a view of its bucket"
        assert not gradient.any()


def test_ddp_clears_its_buckets_in_one_operator() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_that_buckets_are_cleared()
    finally:
        # DDP must go first: the last owner of the group waits for threads, and DDP would keep Python's lock from them.
        gc.collect()
        dist.destroy_process_group()


# -- activation checkpointing ------------------------------------------------------------------------------------


def backward(
    recompute: ActivationCheckpointing, *, dropout: float, dtype: torch.dtype
) -> list[Any]:
    """Return loss and gradients of one pass."""
    config = ModelConfig(
        n_layer=3, n_head=2, n_embd=64, context_length=32, vocab_size=64, dropout=dropout
    )
    model = build_model(config, seed=1, device=torch.device("cpu"))
    apply_activation_checkpointing(model, recompute)
    ids = torch.arange(128).view(4, 32) % 64
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_recomputing_changes_no_bit(
    recompute: ActivationCheckpointing, dtype: torch.dtype, dropout: float
) -> None:
    expected = backward("none", dropout=dropout, dtype=dtype)
    found = backward(recompute, dropout=dropout, dtype=dtype)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
