"""The step of a rank of several, compiled for a GPU that is not there: graphs, recompiles, operators outside."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cuda_codegen import parallel
from benchmarks.cuda_codegen.device import what_is_missing
from benchmarks.cuda_codegen.parallel import ParallelCase

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing())),
]


@pytest.fixture(scope="module")
def counted() -> list[dict[str, Any]]:
    """Return a step of two layers under fsdp, whose blocks share their graphs: the fastest to compile.

    Then the same where the blocks' matrices are gathered in bf16.
    """
    cases = [ParallelCase("fsdp"), ParallelCase("fsdp", param_dtype="bf16")]
    return parallel.generate("sm_90", cases)


def test_nothing_compiles_after_the_first_step(counted: list[dict[str, Any]]) -> None:
    for row in counted:
        assert row["compiled"][0] > 0
        assert len(set(row["compiled"])) == 1


def test_fsdp_compiles_one_block_and_the_loss(counted: list[dict[str, Any]]) -> None:
    """Forward and backward of each. Embeddings and the last norm run uncompiled: see docs/gpu_results.md."""
    for row in counted:
        assert [graph["is_backward"] for graph in row["graphs"]] == [False, True, False, True]
        assert row["graph_breaks"] <= 1


def test_matrices_gathered_in_bf16_are_cast_by_no_kernel_of_a_block(
    counted: list[dict[str, Any]],
) -> None:
    """Neither the four weights in forward, nor their gradients in backward."""
    fp32, bf16 = ([graph["kernels"] for graph in row["graphs"]] for row in counted)
    assert [a - b for a, b in zip(fp32, bf16, strict=True)] == [4, 4, 0, 0]


def test_the_operators_outside_are_within_budget(counted: list[dict[str, Any]]) -> None:
    """The budget is what was counted. 28 add gradients of a second micro-batch, 10 reject what is not finite.

    Each gathering in bf16 casts this rank's rows in one.
    """
    for row, budget in zip(counted, (86, 94), strict=True):
        assert row["outside"]["_fused_adamw_"] == 2  # matrices and vectors
        assert sum(row["outside"].values()) <= budget
