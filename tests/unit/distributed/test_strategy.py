"""The same curve and the same checkpoints, whatever each process holds and whatever is computed twice."""

import functools
import gc
import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import launch
from gpt2lab.config.schema import ActivationCheckpointing, ModelConfig, SystemConfig
from gpt2lab.distributed import sharding
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy, apply_activation_checkpointing
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import count_parameters
from gpt2lab.model.gpt import build_model
from one_process import Operators
from tiny import flags_for, resolved
from whole_run import Run

STEPS = 20
MODES = ("ddp", "zero1", "fsdp")
COUNTER = launch.WORKERS / "count_traffic.py"
# 257 rows of the embedding, which two processes cannot share evenly.
MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=257)
PADDED = 4 * (count_parameters(MODEL) + MODEL.n_embd)  # bytes, with the embedding's 258th row
HOW = {"vocab_size": 257, "max_steps": STEPS, "eval_freq": 10, "checkpoint_freq": 5}
RUN = flags_for(**HOW)
COMPILED = {"compile": "on", "activation_checkpointing": "selective", "parallel": "fsdp"}


@pytest.fixture(scope="module")
def alone(tiny_run) -> Callable[..., Run]:
    """Return a function from further settings to the run of one process."""
    return functools.cache(lambda **more: tiny_run(**HOW, **more))


@pytest.fixture(scope="module")
def by_two(tiny_run) -> Callable[..., tuple[Run, dict[str, Any]]]:
    """Return the run of two processes in a mode, and what the collectives of its last step carried."""

    @functools.cache
    def run(mode: str, optimizer: str) -> tuple[Run, dict[str, Any]]:
        one = tiny_run(*RUN)
        said = one.train(world=2, program=COUNTER, parallel=mode, optimizer=optimizer)
        counted = [json.loads(line[8:]) for line in said.splitlines() if line[:8] == "counted "]
        assert len(counted) == 2
        return one, counted[0]

    return lambda mode, optimizer="adamw": run(mode, optimizer)


def copied(run: Run, to: Run) -> Run:
    shutil.copytree(run.path, to.path)
    return to


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_train_as_one(mode, by_two, alone):
    by_two(mode)[0].assert_same_curve(alone(), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world", "how"),
    [
        *(("speedrun", 2, {"parallel": mode}) for mode in MODES),
        ("speedrun", 4, {}),
        ("speedrun", 1, {"activation_checkpointing": "block"}),
        ("speedrun", 1, {"activation_checkpointing": "selective"}),
        ("speedrun", 1, {"compile": "on"}),
        ("gpt2", 2, COMPILED),
    ],
)
def test_a_model_trains_alike_in_every_mode(model, world, how, alone, run):
    run.train(world=world, model=model, **how)
    run.assert_same_curve(alone(model=model), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_zero1_trains_as_ddp_bit_by_bit(optimizer, by_two):
    """The update of a number, or of a matrix, needs no other one, so who makes it cannot matter."""
    one, other = by_two("ddp", optimizer)[0], by_two("zero1", optimizer)[0]
    assert one.bits() == other.bits()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_gradients_travel_once_a_step_with_the_last_micro_batch(mode, by_two):
    """Two micro-batches: nothing is sent before or in the first, then each gradient once, and the loss."""
    _, counted = by_two(mode)
    assert counted["begun"] == [{}, {}]
    assert counted["bytes"]["all_reduce"] == 4 * count_parameters(MODEL) + 4
    assert "reduce_scatter" not in counted["calls"]
    assert counted["bytes"].get("all_gather", 0) == (PADDED if mode == "zero1" else 0)


@pytest.mark.slow
def test_fsdp_sends_blocks_for_each_micro_batch_and_the_rest_once(by_two):
    _, counted = by_two("fsdp")
    # Two blocks: their weights twice, their gradients once. The rest is gathered in the first micro-batch, and stays
    # whole until its gradients have been summed in the last.
    first = {"all_gather": 4 + 1, "reduce_scatter": 2}
    assert counted["begun"] == [{}, first]
    assert counted["calls"] == {"all_gather": 8 + 1, "reduce_scatter": 4 + 1, "all_reduce": 2}
    C = MODEL.n_embd
    blocks = 4 * MODEL.n_layer * (12 * C * C + 13 * C)
    assert counted["bytes"]["reduce_scatter"] == PADDED + blocks
    assert counted["bytes"]["all_gather"] == PADDED + 3 * blocks
    assert counted["bytes"]["all_reduce"] == 4 + 8  # the loss in fp32, the norm's square in fp64


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
def test_a_resume_in_the_same_mode_keeps_every_bit(mode, by_two, run):
    expected, _ = by_two(mode)
    copied(expected, run).train("--resume=5", world=2)  # the mode is remembered
    assert (run.events("step")[-1]["attempt"], run.bits()) == (2, expected.bits())
    assert [event["level"] for event in run.events("resume")] == ["bit-identical"]


@pytest.mark.slow
def test_gathering_in_bf16_changes_no_bit_of_a_step_and_halves_what_is_gathered(tmp_path):
    """With adapters, Muon and recomputation too; see workers/gathers.py for what is compared."""
    program = launch.WORKERS / "gathers.py"
    done = launch.worked(launch.train_in_forks([str(tmp_path)], world=2, program=program))
    assert done.stdout.count("all compared") == 2


@pytest.mark.slow
def test_a_run_goes_on_in_the_other_precision_of_gathering_where_that_is_allowed(tiny_run):
    how = (*RUN, "--dtype=bf16", "--parallel=fsdp", "--mini_batch_size=4", "--sample_freq=10")
    expected, run = tiny_run(*how), tiny_run(*how)
    expected.train(world=2, program=COUNTER)
    run.train(world=2, program=COUNTER, fsdp_param_dtype="bf16")
    assert run.bits() == expected.bits()
    values = [[event["val_loss"] for event in one.events("eval")] for one in (run, expected)]
    assert values[0] == values[1]
    with pytest.raises(ConfigError, match="fsdp_param_dtype bf16 -> fp32"):
        words = [*run.flags, "--resume=5", "--fsdp_param_dtype=fp32"]
        resolved(words, world_size=2)
    back = {"fsdp_param_dtype": "fp32", "allow_change": "fsdp_param_dtype"}
    run.train("--resume=5", world=2, program=COUNTER, **back)
    assert [event["level"] for event in run.events("resume")] == ["changed"]
    assert run.bits() == expected.bits()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_a_run_wanders_through_modes_and_worlds(optimizer, by_two, alone, run, capsys):
    """2 x ddp, 4 x fsdp, one process, 2 x zero1: owners of matrices change, and all that belongs to them goes along."""
    run.flags.append(f"--optimizer={optimizer}")
    copied(by_two("ddp", optimizer)[0], run)
    fsdp = ("--parallel=fsdp", "--activation_checkpointing=block", "--mini_batch_size=1")
    run.train("--resume=5", *fsdp, "--stop_after_steps=10", world=4)
    run.train("--resume=latest", "--stop_after_steps=15")
    said = capsys.readouterr()
    assert "parallel fsdp -> ddp" in said.out + said.err
    run.train("--resume=latest", "--parallel=zero1", world=2)
    assert [event["step"] for event in run.events("resume")] == [5, 10, 15]
    run.assert_same_curve(alone(optimizer=optimizer), STEPS)


@pytest.mark.slow
def test_steps_norms_rejections_and_files_are_those_of_ddp(tmp_path):
    """Of weights whose rows no number of processes divides; see workers/modes.py for what is compared.

    "fsdp offloaded" is what --fsdp_offload does on a GPU: here it moves nothing, but takes the same way.
    """
    done = launch.train_in_forks([str(tmp_path)], world=3, program=launch.WORKERS / "modes.py")
    assert done.returncode == 0, done.stderr
    for mode in ("zero1", "zero1 scattered", "fsdp", "fsdp offloaded"):
        for optimizer in ("adamw", "muon", "normuon"):
            assert done.stdout.count(f"{mode} agrees with {optimizer}") == 3


@pytest.mark.slow
def test_evaluation_hellaswag_and_samples_are_those_of_one_process(tiny_run, tmp_path):
    # A copy: what was tokenized is kept beside the items.
    items = shutil.copy(launch.REPOSITORY / "tests/golden/hellaswag_items.jsonl", tmp_path)
    more = HOW | {"vocab_size": 50304, "max_steps": 2, "hellaswag_path": items, "eval_freq": 1}
    more |= {"hellaswag_limit": 8, "hellaswag_freq": 1, "sample_freq": 1, "sample_tokens": 8}
    alone, fsdp = tiny_run(**more), tiny_run(**more, parallel="fsdp", world=2)
    for kind, *keys in (("eval", "val_loss", "val_tokens"), ("hellaswag", "acc", "acc_norm", "n")):
        one, other = ([{k: e[k] for k in keys} for e in run.events(kind)] for run in (alone, fsdp))
        assert one, kind
        assert one == [pytest.approx(event, rel=1e-5) for event in other], kind
    texts = [[event["text"] for event in run.events("sample")] for run in (alone, fsdp)]
    assert texts[0]
    assert texts[0] == texts[1]


def test_a_message_is_as_large_as_its_limit_and_matrices_go_by_their_cost(monkeypatch):
    monkeypatch.setattr(sharding, "BUCKET_BYTES", 80)
    pairs = [(torch.zeros(size), torch.zeros(size)) for size in (10, 10, 1, 30, 20)]
    assert [len(bucket) for bucket in sharding.divide(pairs)] == [2, 1, 1, 1]
    square, *flat = (nn.Parameter(torch.zeros(sides)) for sides in ((4, 4), (2, 12), (2, 12)))
    groups = [{"params": [square, *flat], "parts": 1}]
    assert sharding._owners(groups, 2) == {square: 0, flat[0]: 1, flat[1]: 1}


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


def test_ddp_clears_its_buckets_in_one_operator():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_that_buckets_are_cleared()
    finally:
        # DDP must go first: the last owner of the group waits for threads, and DDP would keep Python's lock from them.
        gc.collect()
        dist.destroy_process_group()


def backward(recompute: ActivationCheckpointing, dropout: float, dtype: torch.dtype) -> list[Any]:
    """Return loss and gradients of one pass."""
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 64, "context_length": 32, "vocab_size": 64}
    model = build_model(ModelConfig(**shape, dropout=dropout), seed=1, device=torch.device("cpu"))
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
def test_recomputing_changes_no_bit(recompute, dtype, dropout):
    pairs = zip(backward(recompute, dropout, dtype), backward("none", dropout, dtype), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)
