"""The step of a rank of several, compiled for a GPU that is not there: graphs, recompiles, operators outside."""

from typing import Any

import pytest

from benchmarks.cuda_codegen import parallel
from benchmarks.cuda_codegen.device import what_is_missing
from benchmarks.cuda_codegen.parallel import ParallelCase
from gpt2lab.config.derived import REGIONS_FROM_LAYERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing())),
]


@pytest.fixture(scope="module")
def counted() -> list[dict[str, Any]]:
    """Return steps whose blocks share their graphs: the fastest to compile. Deep models' do in every mode."""
    deep = REGIONS_FROM_LAYERS
    of_fsdp = [ParallelCase("fsdp"), ParallelCase("fsdp", param_dtype="bf16")]
    others = [ParallelCase("ddp", "selective", deep), ParallelCase("zero1", "block", deep)]
    return parallel.generate("sm_90", of_fsdp + others)


def test_nothing_compiles_after_the_first_step(counted):
    for row in counted:
        assert row["compiled"][0] > 0
        assert len(set(row["compiled"])) == 1


def test_embeddings_a_block_and_the_loss_are_compiled(counted):
    """Forward and backward of each, and nothing breaks a graph."""
    for row in counted:
        assert [graph["is_backward"] for graph in row["graphs"]] == [False, True] * 3
        assert row["graph_breaks"] == 0


def test_matrices_gathered_in_bf16_are_cast_by_no_kernel_of_a_block(counted):
    """Neither the four weights in forward, nor their gradients in backward: of each of two blocks."""
    fp32, bf16 = ([graph["kernels"] for graph in row["graphs"]] for row in counted[:2])
    assert [a - b for a, b in zip(fp32, bf16, strict=True)] == [0, 0, 8, 8, 0, 0]


def test_the_operators_outside_are_within_budget(counted):
    """The budget is what was counted. 28 add gradients of a second micro-batch, 10 reject what is not finite.

    Each gathering in bf16 casts this rank's rows in one.
    """
    for row, budget in zip(counted[:2], (60, 68), strict=True):
        assert row["outside"]["_fused_adamw_"] == 2  # matrices and vectors
        assert sum(row["outside"].values()) <= budget
