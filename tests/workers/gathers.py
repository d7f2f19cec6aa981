"""On each of two processes: steps of fsdp that gather the blocks' matrices in bf16, compared with steps in fp32.

gathers.py FOLDER
"""

import dataclasses
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import modes
import torch
import torch.distributed.fsdp

from benchmarks.sharing_worker import Traffic
from gpt2lab.config.schema import BatchConfig, Config, ModelConfig, OptimConfig, SystemConfig
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.planner.communication import step_bytes
from gpt2lab.planner.job import Job
from gpt2lab.training.train_step import StepStats

# No number of rows is odd, so that all ranks share evenly and bytes are exactly the planner's.
PLAIN = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=64)
MODERN = dataclasses.replace(
    PLAIN, positions="rotary", norm="rmsnorm", qk_norm="rmsnorm", activation="relu2"
)
STEPS = 3


class Dtypes(Traffic):
    """Also notes the dtypes that collectives carry."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::_allgather_base_":
            self.of["all_gather"].add(args[0].dtype)
        if func._schema.name == "c10d::_reduce_scatter_base_":
            self.of["reduce_scatter"].add(args[1].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Trained(modes.Trained):
    """A model whose ranks gather it in one precision."""

    def __init__(
        self,
        runtime: Runtime,
        param_dtype: Any,
        *,
        model: ModelConfig = PLAIN,
        optimizer: Any = "adamw",
        recompute: Any = "none",
        **more: Any,
    ) -> None:
        how = {"activation_checkpointing": recompute, "fsdp_param_dtype": param_dtype}
        system = SystemConfig(dtype="bf16", parallel="fsdp", **how)
        super().__init__(runtime, system, OptimConfig(optimizer=optimizer), model=model, **more)

    def step(self, number: int, *, accumulation: int = 1, **how: Any) -> StepStats:
        return super().step(number, rows=2, accumulation=accumulation, grad_clip=0.5, **how)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype == torch.float32 or "step" in name, name
        assert torch.equal(one[name], other[name]), name


def compare_steps(runtime: Runtime, **how: Any) -> None:
    """One micro-batch a step: losses, norms, weights and moments are the same bits."""
    expected, found = Trained(runtime, "fp32", **how), Trained(runtime, "bf16", **how)
    for number in range(1, STEPS + 1):
        one, other = expected.step(number), found.step(number)
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm), number
    assert_same(expected.weights(), found.weights())
    before = found.weights()
    found.step(STEPS + 1, rejected_by="host")  # a rejected update leaves nothing behind
    assert_same(found.weights(), before)
    with found.strategy.full_model(found.model) as model:  # what evaluations and samples read
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        for name, weight in model.named_parameters():
            assert torch.equal(weight, before[name]), name


def compare_micro_batches(runtime: Runtime) -> None:
    """Two micro-batches: vectors are summed over them before ranks instead of after, which moves last bits.

    That is all: where fp32 is gathered in the same groups, the bits are the same.
    """
    policy = torch.distributed.fsdp.MixedPrecisionPolicy
    in_groups = patch.object(
        torch.distributed.fsdp,
        "MixedPrecisionPolicy",
        lambda **options: policy(**(options | {"param_dtype": None})),
    )
    expected, found = Trained(runtime, "fp32"), Trained(runtime, "bf16")
    with in_groups:
        grouped = Trained(runtime, "bf16")
    for number in range(1, STEPS + 1):
        one, other, same = (t.step(number, accumulation=2) for t in (expected, found, grouped))
        assert abs(one.loss - other.loss) <= 1e-4 * one.loss
        assert (same.loss, same.grad_norm) == (other.loss, other.grad_norm)
    assert_same(found.weights(), grouped.weights())


def check_traffic(runtime: Runtime) -> None:
    for model in (PLAIN, MODERN):
        gathered = {}
        for dtype in ("fp32", "bf16"):
            trained = Trained(runtime, dtype, model=model)
            trained.step(1, accumulation=2)
            with Dtypes() as traffic:
                trained.step(2, accumulation=2)
            tokens = 2 * runtime.world_size * model.context_length
            batch = BatchConfig(total_batch_size=tokens, mini_batch_size=1)
            system = SystemConfig(parallel="fsdp", fsdp_param_dtype=dtype)
            config = Config(model=model, batch=batch, system=system)
            job = Job(config, 1, runtime.world_size, "bf16", compiled=False)
            planned = step_bytes(job)
            found = {name: traffic.bytes[name] for name in planned}
            assert found == planned, (dtype, found, planned)
            in_bf16 = {torch.bfloat16} if dtype == "bf16" else set()
            assert traffic.of["all_gather"] == {torch.float32} | in_bf16
            assert traffic.of["reduce_scatter"] == {torch.float32}
            gathered[dtype] = traffic.calls
        assert gathered["fp32"] == gathered["bf16"], "as many messages"


def exchange_checkpoints(folder: Path, runtime: Runtime) -> None:
    """A run goes on in the other precision from files that are the same bytes."""
    for saves, loads in (("fp32", "bf16"), ("bf16", "fp32")):
        expected = Trained(runtime, saves)
        for number in (1, 2):
            expected.step(number)
        saved = expected.save(folder / saves, 2)
        found = Trained(runtime, loads, seed=1)
        found.load(saved)
        assert found.step(3).loss == expected.step(3).loss
        assert_same(found.weights(), expected.weights())


def main(folder: Path) -> None:
    runtime = Runtime()
    for how in (
        *({}, {"optimizer": "muon", "recompute": "block"}),
        *({"model": MODERN, "recompute": "selective"}, {"lora": True}),
    ):
        compare_steps(runtime, **how)
    compare_micro_batches(runtime)
    check_traffic(runtime)
    exchange_checkpoints(folder, runtime)
    sys.stdout.write("all compared\n")  # one write, where print makes two
    runtime.close()


main(Path(sys.argv[1]))
